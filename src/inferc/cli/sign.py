"""The `inferc sign` command, which signs an artifact with an Ed25519 key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inferc.cli.common import Json, print_json, say
from inferc.errors import ConfigError


def sign(
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The artifact to sign.", show_default=False)
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="An Ed25519 private key, made by --new-key or by ssh-keygen."),
    ] = None,
    new_key: Annotated[
        Path | None,
        typer.Option(
            "--new-key",
            metavar="FILE",
            help="Make a key pair: FILE is the private key (mode 0600); FILE.pub is the public key that others add to"
            " their --trusted-keys.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Sign an artifact, so that `--trusted-keys` accepts it; the whole artifact is checked first, with its weights.

    The signature is one more file in the artifact (signature.json). After any change of the artifact, including an
    added target, it must be signed again.
    """
    from inferc.signature import new_key as make_key
    from inferc.signature import read_private_key

    if (key is None) == (new_key is None):
        raise ConfigError(
            "give --key FILE to sign with a key that you have, or --new-key FILE to make one, and not both"
        )
    if out is None and new_key is None:
        raise ConfigError("give the artifact to sign: inferc sign OUT --key FILE")
    private = None if key is None else read_private_key(key)  # read first, because reading the artifact takes longer
    made = None if new_key is None else make_key(new_key, new_key.name)
    facts: dict[str, str] = {}
    if made is not None and new_key is not None:
        private = read_private_key(new_key)
        facts |= {"public_key": made.line, "fingerprint": made.fingerprint}
    if out is not None and private is not None:
        from inferc.runtime.artifact.sign import sign_artifact

        facts |= {"signed": str(out), "fingerprint": sign_artifact(out, private).fingerprint}
    if as_json:
        print_json(facts)
        return
    if made is not None:
        say(f"{new_key}: a new key, {made.fingerprint}; {new_key}.pub has its line for --trusted-keys")
    if out is not None:
        say(f"{out}: signed by {facts['fingerprint']}")
