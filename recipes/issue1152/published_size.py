"""python -m recipes.issue1152.published_size: how large were the gradients that FP8 saw in the published run?

From its initialization alone, for 32 layers of Mixtral 8x7B and one sequence of tokens with Zipf's frequencies. The
width is reduced to 512 and the weights' std raised by sqrt(4096 / 512), so that every activation has the rms that it
has at full width; gradients per element, which are smaller there by that factor, are divided by it. Attention's logits,
whose std is 0.4 at full width, are left at zero: every token attends evenly. Ten seconds on a CPU core.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH, PUBLISHED_WIDTH, LAYERS, EXPERTS, VOCAB = 512, 4096, 32, 8, 32000
LENGTH, TOKENS = 512, 32 * 4096  # of the sequence; by which a token's loss is divided before backward
STD, OUT_STD = 0.01, 0.01 / 64**0.5
RATIO = (PUBLISHED_WIDTH / WIDTH) ** 0.5


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


def _weight(n: int, k: int, std: float) -> Tensor:
    return torch.randn(k, n) * (std * RATIO)


def _attention(x: Tensor) -> Tensor:
    """x [T, D] -> [T, D]."""
    v = x @ _weight(WIDTH, WIDTH, STD)
    mean = v.cumsum(0) / torch.arange(1, len(v) + 1).unsqueeze(1)
    return mean @ _weight(WIDTH, WIDTH, OUT_STD)


def _experts(x: Tensor) -> Tensor:
    """x [T, D] -> [T, D]: two of eight experts a token, scores renormalized."""
    hidden = WIDTH * 7 // 2
    scores, chosen = torch.softmax(x @ _weight(EXPERTS, WIDTH, STD), -1).topk(2)
    scores = scores / scores.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        mine = chosen == e
        rows = mine.any(-1).nonzero().squeeze(1)
        w1, w3 = _weight(hidden, WIDTH, STD), _weight(hidden, WIDTH, STD)
        y = (F.silu(x[rows] @ w1) * (x[rows] @ w3)) @ _weight(WIDTH, hidden, OUT_STD)
        out = out.index_add(0, rows, y * (scores * mine).sum(-1)[rows].unsqueeze(1))
    return out


def _rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def gradients() -> list[tuple[float, float, float]]:
    """For each layer: rms of the residual stream after it, and of the gradients of its two outputs at full width."""
    torch.manual_seed(0)
    frequency = 1 / torch.arange(1, VOCAB + 1)
    tokens = torch.multinomial(frequency / frequency.sum(), LENGTH, replacement=True)
    h = (torch.randn(VOCAB, WIDTH) * STD)[tokens].requires_grad_()
    streams, outputs = [], []
    for _ in range(LAYERS):
        for part in (_attention, _experts):
            out = part(_norm(h))
            out.retain_grad()
            outputs.append(out)
            h = h + out
        streams.append(_rms(h))
    logits = _norm(h) @ _weight(VOCAB, WIDTH, STD)
    loss = F.cross_entropy(logits, torch.randint(0, VOCAB, (LENGTH,)), reduction="sum")
    (loss / TOKENS).backward()
    grads = [_rms(out.grad) / RATIO for out in outputs]
    return list(zip(streams, grads[0::2], grads[1::2], strict=True))


def main() -> None:
    """Prints the table."""
    print("E5M2 with scale 1 turns what is below 7.6e-6 into zeros.\n")
    print("layer   residual stream   gradient of attention's output   of the experts' output")
    for i, (stream, attention, experts) in enumerate(gradients()):
        if i in (0, 1, 3, 7, 15, 31):
            print(f"{i + 1:5}   {stream:15.3f}   {attention:30.1e}   {experts:22.1e}")


if __name__ == "__main__":
    main()
