"""A domain's database, copied only where an episode touches it.

Parsing or copying the whole database costs 50 to 250 ms an episode. Its entries are looked up by
key in tables, so each episode gets tables that share the entries and copy one when it is asked
for.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any


class Table(dict[str, Any]):
    """Shared entries, each replaced by a copy of its own the first time it is looked up.

    Iterating (``items``, ``values``) gives entries as they are, for reading only: so do tau2's
    tools, which change nothing that they have not looked up by its key.
    """

    def __init__(self, shared: dict[str, Any]) -> None:
        super().__init__(shared)
        self._shared = shared
        self._own: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key in self._shared and key not in self._own:
            entry = copy.deepcopy(super().__getitem__(key))
            self[key] = entry
        return super().__getitem__(key)

    def __setitem__(self, key: str, entry: Any) -> None:
        self._own.add(key)
        super().__setitem__(key, entry)

    def get(self, key: str, default: Any = None) -> Any:
        """As in ``dict``, with the copy that :meth:`__getitem__` makes."""
        return self[key] if key in self else default  # noqa: SIM401 - get is what this is

    def changes(self) -> dict[str, Any]:
        """Entries that differ from the shared ones, as plain data; None for one that is gone."""
        found: dict[str, Any] = {key: None for key in self._shared.keys() - self.keys()}
        for key in self._own & self.keys():
            entry = super().__getitem__(key).model_dump()
            if key not in self._shared or entry != self._shared[key].model_dump():
                found[key] = entry
        return found


class Database:
    """The database of a domain as it is before any episode.

    Args:
        model: the parsed database, a pydantic model whose fields are tables (dicts by key).
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._tables = list(type(model).model_fields)

    def fresh(self) -> Any:
        """A database for one episode, in its first state."""
        tables = {name: Table(getattr(self.model, name)) for name in self._tables}
        return type(self.model).model_construct(**tables)

    def fingerprint(self, used: Any) -> str:
        """Hash of what an episode changed.

        Two episodes have equal fingerprints exactly if tau2's hashes of their whole databases are
        equal: both hash the same plain data, this one without what neither has touched.
        """
        changes = {name: getattr(used, name).changes() for name in self._tables}
        text = json.dumps(changes, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
