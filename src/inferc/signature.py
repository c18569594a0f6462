"""The signatures of an artifact: Ed25519 signatures beside its files, and the keys that are trusted.

Digests in engine.json prove that files are as they were written, by whomever. A signature signs a statement: the
SHA-256 of engine.json, which contains the SHA-256 of all files that are executed or read whole, and the SHA-256 of each
chunk of the files that are mapped. The manifest has only XXH3 digests of those chunks, which an attacker could forge.

The file is a DSSE envelope (Dead Simple Signing Envelope 1.0, of the in-toto project), and keys are OpenSSH's:
`ssh-keygen -t ed25519` makes them as well, and `ssh-keygen -l` shows the same fingerprints.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from inferc.errors import ArtifactError, ConfigError
from inferc.manifest import MANIFEST, SIGNATURE, json_bytes
from inferc.manifest_types import Sha256, read_typed
from inferc.system.atomic_file import atomic_write

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PAYLOAD_TYPE = "application/vnd.inferc.artifact+json"
KIND = "ssh-ed25519"
MAX_BYTES = 1 << 20  # the largest size of a file of keys
SIGN = "sign it: `inferc sign {folder} --key KEY`"


class Statement(Struct, frozen=True):
    """The statement that is signed; `chunks` holds, for each mapped file, the SHA-256 of every CHUNK_BYTES."""

    engine_json_sha256: Sha256
    chunks: dict[str, list[Sha256]]


class EnvelopeSignature(Struct, frozen=True):
    keyid: Annotated[str, Meta(max_length=100)]
    sig: str


class Envelope(Struct, frozen=True):
    """The contents of signature.json."""

    payloadType: str
    payload: str
    signatures: Annotated[list[EnvelopeSignature], Meta(min_length=1, max_length=100)]


class SignatureFacts(Struct, frozen=True):
    """The facts about a signature: the fingerprints of its keys, and whether it is of the present engine.json."""

    keys: list[str]
    is_current: bool


@dataclass(frozen=True)
class PublicKey:
    """A key that signatures are checked by; `comment` says whose it is, as in the key's line."""

    key: Ed25519PublicKey
    comment: str = ""

    @property
    def line(self) -> str:
        """The key as OpenSSH writes it, in a .pub file or a file of trusted keys."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return f"{self.key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()} {self.comment}".rstrip()

    @property
    def fingerprint(self) -> str:
        """The key's fingerprint as `ssh-keygen -l` shows it."""
        digest = hashlib.sha256(base64.b64decode(self.line.split()[1])).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

    @property
    def name(self) -> str:
        return f"{self.fingerprint} ({self.comment})" if self.comment else self.fingerprint


# -------------------------------------------------------------------------------------------------- keys


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError(
            "signatures need the package cryptography, which is not installed; pip install 'inferc[serve]'"
        ) from None


def new_key(path: Path, comment: str = "") -> PublicKey:
    """Make a pair of keys, `path` and `path`.pub; only the owner can read `path`.

    Raises ConfigError where one of the files exists.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    made = Ed25519PrivateKey.generate()
    public = PublicKey(made.public_key(), comment)
    private = made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    beside = path.with_name(f"{path.name}.pub")
    written: list[Path] = []
    try:
        for to, data, mode in ((path, private, 0o600), (beside, f"{public.line}\n".encode(), 0o644)):
            with os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
                written.append(to)
                file.write(data)
    except OSError as error:
        for each in written:
            each.unlink(missing_ok=True)
        why = "it is there already" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"cannot write the key {error.filename}: {why}; give another name") from None
    return public


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key in OpenSSH's format or PEM; raise ConfigError for anything else, saying what it is."""
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    data, found = _read(path), None
    if data.startswith(f"{KIND} ".encode()):
        private = f", {path.with_suffix('')}" if path.suffix == ".pub" else ""
        raise ConfigError(f"{path} is the public half of a key; sign with the private one{private}")
    for load in (load_ssh_private_key, load_pem_private_key):
        with suppress(Exception):  # a file of the other format raises exceptions of many kinds
            found = found or load(data, None)
    if not isinstance(found, Ed25519PrivateKey):
        is_locked = b"ENCRYPTED" in data or (b"OPENSSH PRIVATE KEY" in data and found is None)
        what = "locked by a passphrase, or damaged" if is_locked else "no Ed25519 private key"
        raise ConfigError(
            f"{path} is {what}; give one without a passphrase, as `inferc sign --new-key {path.name}.new` makes it"
        )
    return found


def read_trusted_keys(path: Path) -> tuple[PublicKey, ...]:
    """Read the keys of a file, one per line as in OpenSSH's .pub files; # begins a comment. Raises ConfigError."""
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        lines = _read(path).decode().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a file of keys: it is not UTF-8") from None
    keys = []
    for number, line in enumerate(lines, 1):
        kind, _, rest = line.strip().partition(" ")
        if not kind or kind.startswith("#"):
            continue
        if kind != KIND:
            raise ConfigError(
                f"{path}, line {number}: found {kind[:40]!r}, expected {KIND}, as in a .pub file of OpenSSH"
            )
        data, _, comment = rest.strip().partition(" ")
        try:
            key = load_ssh_public_key(f"{kind} {data}".encode())
            assert isinstance(key, Ed25519PublicKey)
        except Exception:  # noqa: BLE001  (a damaged key raises exceptions of many kinds)
            raise ConfigError(f"{path}, line {number}: the key is damaged; copy it again") from None
        keys.append(PublicKey(key, comment.strip()))
    if not keys:
        raise ConfigError(f"{path} has no keys; expected lines of .pub files, which `inferc sign --new-key KEY` makes")
    return tuple(keys)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes; expected keys of OpenSSH")
    return data


# -------------------------------------------------------------------------------------------- signatures


def to_sign(payload: bytes) -> bytes:
    """Return the bytes that are signed, in DSSE's pre-authentication encoding.

    The encoding contains the payload's type, so that no type can be taken for another.
    """
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def write_signature(
    folder: Path, manifest: bytes, chunks: Mapping[str, Sequence[str]], key: Ed25519PrivateKey
) -> PublicKey:
    """Sign an artifact whose engine.json and chunks have been checked; return the public key.

    Signatures of the same statement by other keys stay.
    """
    public = PublicKey(key.public_key())
    digest = hashlib.sha256(manifest).hexdigest()
    payload = json_bytes({"engine_json_sha256": digest, "chunks": {name: list(each) for name, each in chunks.items()}})
    encoded = base64.b64encode(payload).decode()
    others: list[EnvelopeSignature] = []
    with suppress(ArtifactError):
        before = read_envelope(folder)
        if before is not None and before.payload == encoded:
            others = [each for each in before.signatures if each.keyid != public.fingerprint]
    made = {"keyid": public.fingerprint, "sig": base64.b64encode(key.sign(to_sign(payload))).decode()}
    rows: list[dict[str, Any]] = [*({"keyid": each.keyid, "sig": each.sig} for each in others), made]
    with atomic_write(folder / SIGNATURE) as partial:
        partial.write_bytes(json_bytes({"payloadType": PAYLOAD_TYPE, "payload": encoded, "signatures": rows}))
    return public


def read_envelope(folder: Path) -> Envelope | None:
    """Read signature.json; return None where there is none, and raise ArtifactError for what is no envelope."""
    path = folder / SIGNATURE
    try:
        envelope = read_typed(path.read_bytes(), Envelope)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ArtifactError(f"{path} is not a signature: {error}; {SIGN.format(folder=folder)}") from None
    if envelope.payloadType != PAYLOAD_TYPE:
        raise ArtifactError(f"{path} is a signature of something else: {envelope.payloadType!r:.80}")
    return envelope


def signature_facts(folder: Path, manifest: bytes) -> SignatureFacts | None:
    """Return what an artifact says of its signature, or None where it has none.

    Without a trusted key this proves nothing. Raises ArtifactError for a damaged signature.
    """
    envelope = read_envelope(folder)
    if envelope is None:
        return None
    is_current = statement_of(folder, envelope).engine_json_sha256 == hashlib.sha256(manifest).hexdigest()
    return SignatureFacts([each.keyid for each in envelope.signatures], is_current)


def statement_of(folder: Path, envelope: Envelope) -> Statement:
    """Return the statement in an envelope, whoever signed it; raise ArtifactError for a damaged one."""
    try:
        return read_typed(_decoded(envelope.payload), Statement)
    except ValueError as error:
        raise ArtifactError(f"{folder / SIGNATURE} is damaged: {error}; {SIGN.format(folder=folder)}") from None


def check_signature(
    folder: Path, manifest: bytes, mapped: Mapping[str, Sequence[str]], trusted: Sequence[PublicKey], keys_file: Path
) -> tuple[PublicKey, Statement]:
    """Return the trusted key that signed the artifact with this engine.json, and the statement that it signed.

    mapped: the manifest's digests of the chunks of each mapped file. Raises ArtifactError if the artifact is not
    signed, is signed by none of the keys, or was changed since.
    """
    envelope = read_envelope(folder)
    if envelope is None:
        raise ArtifactError(
            f"{folder} is not signed, and only what a key of {keys_file} signed is loaded; {SIGN.format(folder=folder)}"
        )
    key = _signer(folder, envelope, trusted, keys_file)
    statement = statement_of(folder, envelope)
    sign = SIGN.format(folder=folder)
    if hashlib.sha256(manifest).hexdigest() != statement.engine_json_sha256:
        raise ArtifactError(
            f"{folder} was changed after {key.name} signed it: its {MANIFEST} is another;"
            f" if the change is yours (a target that was added), {sign}"
        )
    if {name: len(each) for name, each in mapped.items()} != {
        name: len(each) for name, each in statement.chunks.items()
    }:
        raise ArtifactError(f"the signature of {folder} is of other weight files than {MANIFEST} names; {sign}")
    return key, statement


def _signer(folder: Path, envelope: Envelope, trusted: Sequence[PublicKey], keys_file: Path) -> PublicKey:
    from cryptography.exceptions import InvalidSignature

    known = {key.fingerprint: key for key in trusted}
    ours = [(known[each.keyid], each.sig) for each in envelope.signatures if each.keyid in known]
    if not ours:
        signers = ", ".join(each.keyid for each in envelope.signatures[:3])
        raise ArtifactError(
            f"{folder} is signed by {signers}, which is not among the keys of {keys_file} ({len(trusted)});"
            " add the key's line there if you trust its owner"
        )
    for key, signature in ours:
        with suppress(InvalidSignature, ValueError):
            key.key.verify(_decoded(signature), to_sign(_decoded(envelope.payload)))
            return key
    raise ArtifactError(
        f"the signature of {folder} by {ours[0][0].name} does not match: {SIGNATURE} was changed,"
        f" or is not by that key; {SIGN.format(folder=folder)}"
    )


def _decoded(text: str) -> bytes:
    """Decode base64; raise ValueError for anything else."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"it is not base64: {error}") from None
