"""The API reference: which modules it has, on which page. Its text is their docstrings, by mkdocstrings."""

PAGES = {
    "Environments": [
        "embodichain.envs.registration",
        "embodichain.envs.vec_env",
        "embodichain.envs.task",
        "embodichain.envs.task_env",
        "embodichain.envs.actions",
        "embodichain.envs.wrappers",
        "embodichain.envs.gymnasium_env",
        "embodichain.envs.checker",
        "embodichain.envs.robots",
    ],
    "Environment settings": ["embodichain.envs.env_cfg", "embodichain.envs.scene_cfg", "embodichain.envs.curricula"],
    "Streaming": [
        "embodichain.agents.engine.data",
        "embodichain.agents.engine.config",
        "embodichain.agents.datasets.online_data",
        "embodichain.agents.datasets.sampler",
        "embodichain.agents.datasets.lerobot.writer",
        "embodichain.agents.datasets.lerobot.reader",
    ],
    "Training": [
        "embodichain.agents.rl.train",
        "embodichain.agents.rl.trainer",
        "embodichain.agents.rl.config",
        "embodichain.agents.rl.checkpoint",
        "embodichain.agents.rl.evaluation",
        "embodichain.agents.rl.runs",
    ],
    "Algorithms": [
        "embodichain.agents.rl.algo.base",
        "embodichain.agents.rl.algo.ppo",
        "embodichain.agents.rl.algo.grpo",
        "embodichain.agents.rl.algo.distillation",
        "embodichain.agents.rl.algo.imitation",
        "embodichain.agents.rl.algo.advantages",
        "embodichain.agents.rl.utils",
    ],
    "Policies": [
        "embodichain.agents.rl.models.policy",
        "embodichain.agents.rl.models.actor_critic",
        "embodichain.agents.rl.models.mlp",
        "embodichain.agents.rl.models.distributions",
        "embodichain.agents.rl.models.chunk_policy",
        "embodichain.agents.rl.models.vla_policy",
    ],
    "Collection": [
        "embodichain.agents.rl.collector.sync_collector",
        "embodichain.agents.rl.collector.async_collector",
        "embodichain.agents.rl.collector.config",
        "embodichain.agents.rl.buffer.rollout_buffer",
    ],
    "Configuration and errors": [
        "embodichain.config",
        "embodichain.config.files",
        "embodichain.errors",
        "embodichain.extras",
    ],
}


def _file(title: str) -> str:
    return f"api/{title.lower().replace(' ', '_')}.md"


def page_names() -> list[dict[str, str]]:
    """Return the entries of the navigation."""
    return [{title: _file(title)} for title in PAGES]


def pages() -> dict[str, str]:
    """Return all pages by name."""
    return {
        _file(title): f"# {title}\n\n" + "\n\n".join(f"::: {module}" for module in modules) + "\n"
        for title, modules in PAGES.items()
    }
