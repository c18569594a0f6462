"""The schemes of `--quantize`, one a row: what becomes an integer, and how far that may move the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """max_kl (nats, mean over positions) and min_top1 are to Hugging Face's float32 run; the certificate refuses more."""

    name: str
    what: str
    quantizes_rows: bool  # the rows that a product reads become int8 too, as they are computed
    max_kl: float
    min_top1: float
    group: int = 0  # of neighbours in four bits that share a scale; 0: int8, a scale for each output


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", "W8A16: weights in int8 with a scale per output", False, max_kl=0.01, min_top1=0.9),
        Scheme(
            "w8a8", "W8A8: weights as in int8, rows in int8 with a scale per token", True, max_kl=0.05, min_top1=0.85
        ),
        *(
            Scheme(
                name,
                f"W4A8: weights in four bits with a scale per {group} of them, rows as in w8a8; embedding, LM head"
                " and experts as in int8",
                True,
                max_kl=max_kl,
                min_top1=0.5,
                group=group,
            )
            for name, group, max_kl in (
                ("int4", 32, 0.2),
                ("int4-g32", 32, 0.2),
                ("int4-g64", 64, 0.25),
                ("int4-g128", 128, 0.3),
            )
        ),
    )
}
