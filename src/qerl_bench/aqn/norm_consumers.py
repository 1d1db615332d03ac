"""Which linear layers a norm's noise reaches, and how large their quantization error is.

Noise on a norm of relative size s changes the weights behind it by s in the Frobenius norm, ||W diag(s z)|| = s ||W||
on average. That is the same measure as a layer's relative quantization error, so the two can be compared and matched.
The layers behind no norm (o_proj, down_proj) get no noise from one; the head behind the final norm is not quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

FEEDS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def error_of_norms(norms: Iterable[str], errors: Mapping[str, float]) -> dict[str, float]:
    """For each norm, the root mean square of the relative errors of the layers it feeds; 0 for one that feeds none.

    `errors` is by layer name. Raises AssertionError if a layer that a block norm should feed has no error.
    """
    found = {}
    for norm in norms:
        block, _, leaf = norm.rpartition(".")
        fed = [f"{block}.{layer}" for layer in FEEDS.get(leaf, ())]
        missing = [layer for layer in fed if layer not in errors]
        assert not missing, f"{norm} should feed {', '.join(missing)}, for which no quantization error was measured"
        found[norm] = root_mean_square([errors[layer] for layer in fed])
    return found


def root_mean_square(values: Iterable[float]) -> float:
    """0 for no values."""
    squares = [value * value for value in values]
    return (sum(squares) / max(1, len(squares))) ** 0.5
