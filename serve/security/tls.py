"""TLS for both endpoints, with certificates that are read again when their files change.

Handshakes from then on see the new ones; connections that stand go on. Files that do not fit together, or are damaged,
leave all as it was. Imported only where TLS is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
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
    """PEM files: the certificate with its chain, its key, and the authorities whose clients are let in (mTLS)."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class _Loaded:
    """The files' contents, checked."""

    key: bytes
    chain: bytes
    client_ca: bytes | None
    expires: datetime


class Certificates:
    """What both endpoints take their certificates from. Raises ConfigError for files that cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = self._look()  # before they are read: what changes meanwhile is read again
        self._loaded = _load(files)
        if self._loaded.expires < datetime.now(timezone.utc):
            raise ConfigError(f"{files.cert}: the certificate expired on {self._loaded.expires:%Y-%m-%d}; renew it")
        self._context = self._make_context()
        self._read_at = 0.0  # when they were read again, in seconds since 1970
        # Handshakes begin with the first context, which hands them to the one of now.
        self._entrance = self._make_context()
        self._entrance.sni_callback = self._enter
        self._warn()

    @property
    def expires(self) -> datetime:
        return self._loaded.expires

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """For HTTP."""
        return self._entrance

    def grpc_credentials(self) -> grpc.ServerCredentials:
        is_mutual = self._files.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self._grpc_configuration(), self._grpc_configuration, is_mutual)

    async def follow(self) -> None:
        """Read the files again whenever they change."""
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
        except ConfigError as error:  # maybe one of them is still to be written: it is tried again
            self._loaded = before
            log.error("the certificates stay as they were: %s", error)
        else:
            self._read_at = time.time()
            log.info("the certificates were read again; this one expires on %s", f"{self._loaded.expires:%Y-%m-%d}")
            self._warn()
        self._stamps = stamps

    def _warn(self) -> None:
        left = self._loaded.expires - datetime.now(timezone.utc)
        if left < WARN_BEFORE:
            log.warning("%s: the certificate expires in %d days; renew it", self._files.cert, left.days)

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Asked for by gRPC before each handshake."""
        loaded = self._loaded
        return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.chain)], loaded.client_ca)

    def _enter(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> int | None:
        # Who resumes a session shows no certificate again, and its authority may be none any more.
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
                context.num_tickets = 0  # no sessions to resume, as `_enter` cannot see those of TLS 1.3
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
