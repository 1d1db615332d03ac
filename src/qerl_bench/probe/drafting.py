"""What a policy in few bits is worth as a draft: it proposes tokens, and one in 16 bits verifies several at a time.

A verifier with probabilities p keeps a token drafted with q with probability min(1, p / q), else draws one of its own
from what is left, so texts follow p (Leviathan et al., arXiv 2211.17192; in RL with a quantized draft, 2606.18967). Its
own answers are therefore the texts to measure on. Left out: drafts that are trees, and what either pass costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from qerl_bench.model.policy import Policy
from qerl_bench.probe.scoring import acceptance, passes, scores
from qerl_bench.train.spec import TrainSpec
from qerl_bench.train.update import precision
from qerl_core.process.progress import phase
from qerl_core.records import Rollout
from qerl_studies.probes.numbers import DRAFTED


@torch.no_grad()
def drafting(
    train: TrainSpec, verifier: Policy, draft: Policy, rollouts: Sequence[Rollout], samples: int
) -> dict[str, list[float]]:
    """Sums over the `samples` answers to each question, which the verifier gave at temperature 1, to three decimals.

    `tokens`; `accepted`, of how many the verifier is expected to keep a draft that is made there, by the whole
    distributions of both; `verifications`, how many passes of the verifier the answers are expected to take.
    """
    found: list[tuple[float, float, float]] = []
    with phase("scoring answers as drafts"), precision(train, verifier.device.type):
        for some in passes(rollouts):
            of_verifier = scores(verifier, some)
            of_draft = of_verifier if draft is verifier else scores(draft, some)
            for one, p, q in zip(some, of_verifier, of_draft, strict=True):
                ids = torch.tensor(one.token_ids, device=p.device)[:, None]
                kept = (q - p).gather(1, ids)[:, 0].double().clamp(max=0).exp().tolist()
                found.append((len(kept), acceptance([p], [q]), verifications(kept, DRAFTED)))
    sums = np.reshape(found, (-1, samples, 3)).sum(1).round(3).T.tolist()
    return dict(zip(("tokens", "accepted", "verifications"), sums, strict=True))


def verifications(kept: Sequence[float], drafted: int) -> float:
    """How many passes of the verifier a text of T tokens is expected to take with `drafted` tokens before each.

    `kept` (T,) is min(p, q) / p of each token: of all ways to come by it, the share in which it is a draft that was
    kept. Drawn so, texts follow p whatever was kept before, so given the text these events are independent. A pass
    ends with a token that the verifier drew, behind the drafts it kept; the next begins behind that.
    """
    begins = [1.0] + [0.0] * (len(kept) + drafted + 1)  # the chance that drafts begin at a place
    for start in range(len(kept)):
        going, end = begins[start], min(start + drafted, len(kept))
        for place in range(start, end):
            begins[place + 1] += going * (1 - kept[place])
            going *= kept[place]
        begins[end + 1] += going
    return sum(begins[: len(kept)])
