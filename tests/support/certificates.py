"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@final
class Authority:
    """Signs certificates; its own is in `folder`/NAME-ca.pem."""

    def __init__(self, folder: Path, name: str = "test") -> None:
        self._folder, self._name = folder, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority")])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}-ca.pem"
        builder = _builder(self._name, self._name, self._key.public_key(), timedelta(days=30))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, valid_for: timedelta = timedelta(days=20)) -> tuple[Path, Path]:
        """`folder`/NAME.pem and its key, for localhost and 127.0.0.1.

        Of one issued before under that name, in its place.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = _builder(subject, self._name, key.public_key(), valid_for)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        cert, file = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return cert, file


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_for: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=60))
        .not_valid_after(now + valid_for)
    )
