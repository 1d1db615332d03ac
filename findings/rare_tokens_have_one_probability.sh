#!/usr/bin/env bash
# torch 2.13.0: Categorical(probs=...) in BF16 takes every token below 0.0078 for one of 0.0078. Over a vocabulary of 32000, the
# exponents of its log-probabilities sum to 252, its entropy is 4.4 for 6.2, a KL divergence is negative, and the gradient of a
# token of 0.001 is 0. Guessed before: right to about three digits, as with logits=.
# Probabilities are clamped to finfo(dtype).eps, for clamp_probs "the smallest representable positive number"; issue 186825 of
# pytorch/pytorch names it for 0 and 1 in Bernoulli. So what: give logits, or FP32, where the least is 1.2e-7.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/env/bin/python" - <<'END'
import torch
from torch.distributions import Categorical, kl_divergence

logits = 3 * torch.randn(32000, generator=torch.Generator().manual_seed(0))
sharp = 1.2 * logits
for key, one, other in (("logits", logits, sharp), ("probs", logits.softmax(-1), sharp.softmax(-1))):
    policy, reference = (Categorical(**{key: rows.bfloat16()}) for rows in (one, other))
    total, entropy, divergence = policy.logits.float().exp().sum(), policy.entropy(), kl_divergence(policy, reference)
    print(f"{key}: sum {total:.3f}, entropy {entropy:.3f}, KL {divergence:.3f}")
    if key == "logits":
        assert abs(total - 1) < 0.02 and abs(entropy - 6.238) < 0.02 and divergence > 0.1
assert total > 250 and entropy < 4.5 and divergence < 0
rare = torch.tensor([0.999, 0.001], requires_grad=True)
Categorical(probs=rare.bfloat16()).log_prob(torch.tensor(1)).backward()
assert not rare.grad.any()
END
