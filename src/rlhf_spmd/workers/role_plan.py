"""What is decided about a role before it is built: its class, its model, its ranks and its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_spmd.controller import GroupShape, ResourcePool
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.layout import GenerationLayout
from rlhf_spmd.workers.compute import RoleClass
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.model_worker import ModelWorker


@dataclass(frozen=True)
class CallPlan:
    """Where the calls of one method run."""

    pool: ResourcePool
    shape: GroupShape


@dataclass(frozen=True)
class RolePlan:
    """A role with all that is decided about it.

    - spec: the model; None for roles without a model
    - calls: the methods that run on other ranks, or in another layout, than the role
    - is_added: the configuration adds the role to those of the algorithm
    - reads_text: the role reads text through a tokenizer of its own, not the tokens of the rows
    - serves: roles of the algorithm that are this role's model as training began; they are the same object
    """

    worker: RoleClass
    config: RoleConfig
    pool: ResourcePool
    shape: GroupShape
    spec: ModelSpec | None
    calls: Mapping[str, CallPlan] = field(default_factory=dict)
    is_added: bool = False
    reads_text: bool = False
    serves: tuple[str, ...] = ()

    def placement_of(self, method: str) -> CallPlan | RolePlan:
        """Return where a method runs."""
        return self.calls.get(method, self)

    @property
    def generation(self) -> GenerationLayout | None:
        """Return the layout of ``generate_sequences``; None for a role that does not generate."""
        return self.placement_of("generate_sequences").shape.generation

    @property
    def trained(self) -> bool:
        """Return True if the role learns."""
        return issubclass(self.worker, ModelWorker) and self.worker.trained

    @property
    def pools(self) -> list[ResourcePool]:
        """Return the role's pool, and those of its methods that run elsewhere."""
        return [self.pool, *(call_plan.pool for call_plan in self.calls.values())]

    @property
    def directory(self) -> Path:
        """Return the model's Hugging Face directory."""
        assert self.config.path is not None, "a role with a model"
        return Path(self.config.path)


RolePlans = Mapping[str, RolePlan]  # by role


def generating_roles(role_plans: RolePlans) -> dict[str, RolePlan]:
    """Return the roles that generate."""
    return {role: role_plan for role, role_plan in role_plans.items() if role_plan.generation is not None}
