"""The families of the table that the cuda target does not run yet, and why."""

LATENT = "inferc cannot run inferc.head_linear yet"  # attention over latents
REFUSED = {"deepseek_v2": LATENT, "deepseek_v3": LATENT, "minicpm3": LATENT}
