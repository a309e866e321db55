"""Feed-forward parts as data: dense gated MLPs and mixtures of experts.

Owns no tensors and reads no files; layers/ computes what is described here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """What joins gate and up: silu(g) u, gelu_tanh(g) u, or SiTU.

    SiTU (Kimi K3): beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta).
    """

    kind: Literal["silu", "gelu_tanh", "situ"] = "silu"
    beta: float = 0.0
    linear_beta: float = 0.0


SILU = ActivationSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlpSpec:
    """Gated MLP: down(act(gate(x), up(x))). `prefixes`: where a checkpoint may have it."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: ActivationSpec = SILU
    prefixes: tuple[str, ...] = ("mlp",)

    @property
    def parameters(self) -> int:
        """Elements of its weights."""
        count = 3 * self.hidden_size * self.intermediate_size
        return count + (2 * self.intermediate_size + self.hidden_size if self.bias else 0)

    def flops_per_token(self) -> float:
        """Multiply-adds times two for one token."""
        return 2.0 * self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Which experts a token goes to, and with what weights.

    Scores s = sigmoid or softmax of W x in float32. The top_k of s (+ bias) are chosen, inside the
    `groups_kept` of `groups` whose two best sum highest. Weights are s, renormalised to a sum of 1
    (`renorm_eps` added to the sum) if asked, times `scale`; the bias is never in them.
    """

    scoring: Literal["sigmoid", "softmax"]
    num_experts: int
    top_k: int
    bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    renormalise: bool = True
    renorm_eps: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNames:
    """How a family spells its expert tensors, below the layer."""

    prefix: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Mixture of experts: routed experts, and shared ones that every token goes through.

    Attributes:
        intermediate_size: of one routed expert.
        shared_size: intermediate size of the shared experts together; 0: none.
        shared_gate: the shared part is multiplied by sigmoid(shared_expert_gate x).
        latent_size: routed experts work in this smaller size, between a down- and an up-projection
            with a norm after the experts (Kimi K3); None: in the hidden size.
    """

    hidden_size: int
    intermediate_size: int
    router: RouterSpec
    names: MoeNames
    shared_size: int = 0
    shared_gate: bool = False
    latent_size: int | None = None
    latent_norm: bool = False
    activation: ActivationSpec = SILU

    @property
    def expert_size(self) -> int:
        """Input and output size of a routed expert."""
        return self.latent_size or self.hidden_size

    def _outside(self) -> int:
        """Elements that every token uses: router, shared experts, latent projections."""
        count = self.router.num_experts * self.hidden_size
        count += self.router.num_experts if self.router.bias else 0
        count += 3 * self.hidden_size * self.shared_size
        count += self.hidden_size if self.shared_gate else 0
        if self.latent_size is not None:
            count += 2 * self.hidden_size * self.latent_size
            count += self.latent_size if self.latent_norm else 0
        return count

    @property
    def parameters(self) -> int:
        """Elements of its weights, all experts included."""
        each = 3 * self.expert_size * self.intermediate_size
        return self._outside() + self.router.num_experts * each

    def flops_per_token(self) -> float:
        """Multiply-adds times two for one token: its chosen experts only."""
        each = 3 * self.expert_size * self.intermediate_size
        return 2.0 * (self._outside() + self.router.top_k * each)


MlpSpec = DenseMlpSpec | MoeSpec
