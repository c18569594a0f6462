"""The TLS certificates of both endpoints, which are read again when their files change.

Later handshakes use the new certificates, and open connections go on. If the files do not fit together or are damaged,
the present certificates stay in use. This module is imported only if TLS is on.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from inferc.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
WARN_BEFORE = timedelta(days=14)


@dataclass(frozen=True)
class TlsFiles:
    """The PEM files of a server: certificate with chain, key, and the authorities of admitted clients (mTLS)."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class _Loaded:
    """The checked contents of the TLS files."""

    key: bytes
    chain: bytes
    client_ca: bytes | None
    expires: datetime


class Certificates:
    """The source of certificates for both endpoints; ConfigError if the files cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = self._look()  # taken before the files are read, so that a change meanwhile is noticed
        self._loaded = _load(files)
        if self._loaded.expires < datetime.now(UTC):
            raise ConfigError(f"{files.cert}: the certificate expired on {self._loaded.expires:%Y-%m-%d}; renew it")
        self._context = self._make_context()
        self._read_at = 0.0  # when the files were last read again, in seconds since 1970
        # Every handshake begins with this first context, whose callback switches it to the present one.
        self._entrance = self._make_context()
        self._entrance.sni_callback = self._enter
        self._warn()

    @property
    def expires(self) -> datetime:
        return self._loaded.expires

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """The TLS context for the HTTP endpoint."""
        return self._entrance

    def grpc_credentials(self) -> grpc.ServerCredentials:
        is_mutual = self._files.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self._grpc_configuration(), self._grpc_configuration, is_mutual)

    async def follow(self) -> None:
        """Read the files again whenever they change, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        stamps = self._look()
        if stamps == self._stamps:
            return
        before = self._loaded
        try:
            self._loaded = _load(self._files)
            self._context = self._make_context()
        except ConfigError as error:  # perhaps one file is still being written: its next change is a new try
            self._loaded = before
            log.error("the certificates stay as they were: %s", error)
        else:
            self._read_at = time.time()
            log.info("the certificates were read again; this one expires on %s", f"{self._loaded.expires:%Y-%m-%d}")
            self._warn()
        self._stamps = stamps

    def _warn(self) -> None:
        left = self._loaded.expires - datetime.now(UTC)
        if left < WARN_BEFORE:
            log.warning("%s: the certificate expires in %d days; renew it", self._files.cert, left.days)

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the present certificates; gRPC calls this before each handshake."""
        loaded = self._loaded
        return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.chain)], loaded.client_ca)

    def _enter(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> int | None:
        # A client that resumes a session shows no certificate again, and its authority may not be admitted any more.
        if self._files.client_ca is not None and connection.session_reused:
            session = connection.session
            if session is None or session.time <= self._read_at:
                return int(ssl.ALERT_DESCRIPTION_ACCESS_DENIED)
        connection.context = self._context
        return None

    def _make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._files.cert, self._files.key)
            if self._files.client_ca is not None:
                context.load_verify_locations(self._files.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
                context.num_tickets = 0  # no session tickets: `_enter` cannot see sessions of TLS 1.3
                context.options |= ssl.OP_NO_TICKET
        except OSError as error:
            raise ConfigError(f"{self._files.cert}: TLS cannot use it: {error.strerror or error}") from None
        return context

    def _look(self) -> list[tuple[int, int] | None]:
        stamps: list[tuple[int, int] | None] = []
        for path in (self._files.cert, self._files.key, self._files.client_ca):
            try:
                status = None if path is None else path.stat()
            except OSError:
                status = None
            stamps.append(None if status is None else (status.st_mtime_ns, status.st_size))
        return stamps


def _load(files: TlsFiles) -> _Loaded:
    chain, key = _read(files.cert), _read(files.key)
    try:
        certificates = x509.load_pem_x509_certificates(chain)
    except ValueError as error:
        raise ConfigError(f"{files.cert}: no certificate in PEM: {error}") from None
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{files.key}: no private key in PEM without a password: {error}") from None
    forms = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    try:
        public = certificates[0].public_key().public_bytes(*forms)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{files.cert}: its public key cannot be used: {error}") from None
    if private.public_key().public_bytes(*forms) != public:
        raise ConfigError(
            f"{files.key} is not the key of the certificate in {files.cert}; give the pair that belongs together"
        )
    client_ca = None
    if files.client_ca is not None:
        client_ca = _read(files.client_ca)
        try:
            x509.load_pem_x509_certificates(client_ca)
        except ValueError as error:
            raise ConfigError(f"{files.client_ca}: no certificate in PEM: {error}") from None
    return _Loaded(key, chain, client_ca, certificates[0].not_valid_after_utc)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}") from None
