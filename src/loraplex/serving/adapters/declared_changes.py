"""Changes of declared adapters by clients: the declaration first, then this server."""

import time
from collections.abc import Awaitable, Callable

import msgspec

from loraplex.adapters.declaration import Declaration, DeclaredName, check_declaration
from loraplex.adapters.staging import StagedAdapter
from loraplex.adapters.store import AdapterVersion, Registration
from loraplex.adapters.version import VersionOrigin, check_name
from loraplex.core.adapter import AdapterKey, AdapterRef, ByName
from loraplex.core.errors import AdapterExistsError, UnsupportedFeatureError
from loraplex.core.principal import Principal
from loraplex.serving.adapter_cards import Unloaded, UnloadMode
from loraplex.serving.adapters.declared_adapters import DeclaredAdapters
from loraplex.serving.catalog import ModelCatalog
from loraplex.serving.served_model import ServedModel

Register = Callable[[StagedAdapter], Awaitable[Registration]]


class DeclaredChanges:
    """Loads, unloads and aliases where servers share declarations."""

    def __init__(self, declared: DeclaredAdapters, catalog: ModelCatalog) -> None:
        self._declared = declared
        self._catalog = catalog

    async def begin_load(
        self,
        model: ServedModel,
        tenant: str,
        name: str,
        *,
        path: str,
        task_id: int | None,
        replace: bool,
    ) -> Register:
        """Check that a load may declare a name; return the function which declares and binds it.

        The version that it declares is fixed here: if another server declares the name meanwhile,
        that function raises AdapterExistsError. Raises as AdapterStore.check_free, and
        AdapterLoadError if the declarations cannot be read.
        """
        await self._declared.refresh()
        key = model.card.name, tenant, name
        present = self._declared.declared(key)
        live = self._declared.wanted.get(key)
        self._check_free(model, key, task_id, replace=replace)
        first = Declaration(
            name=name,
            version=1 if present is None else present.version + 1,
            uri=path,
            model=model.card.name,
            tenant=tenant,
            task_id=live.task_id if live is not None and task_id is None else task_id,
            aliases=() if live is None else live.aliases,
        )
        check_declaration(first)

        async def register(staged: StagedAdapter) -> Registration:
            digest = staged.source.digest
            declaration = msgspec.structs.replace(first, digest=digest, created=int(time.time()))
            is_unchanged = live is not None and live.digest == digest
            if (
                live is None
                or not is_unchanged
                or live.uri != path
                or live.task_id != first.task_id
            ):
                await self._declared.declare(declaration)
            else:
                declaration = live
            version = await self._declared.bind(key, tenant, staged)
            if version.number != declaration.version:
                raise AdapterExistsError(
                    f"version {declaration.version} of adapter {name!r} was replaced by version "
                    f"{version.number} of another server meanwhile",
                    param="name",
                )
            return Registration(version, is_unchanged)

        return register

    async def unload(
        self, model: ServedModel, principal: Principal, key: AdapterKey, mode: UnloadMode
    ) -> Unloaded | None:
        """Declare that an adapter is removed, or an alias; None: the key is not declared."""
        await self._declared.refresh()
        tenant = principal.tenant
        wanted = self._find(model, tenant, key)
        if wanted is None:
            return None
        model.adapters_of(principal).check_manages(wanted.name)
        name = key.name if isinstance(key, ByName) else wanted.name
        if name != wanted.name:
            left = tuple(alias for alias in wanted.aliases if alias != name)
            await self._declare_next(wanted, aliases=left)
            return Unloaded(
                name=name,
                is_alias=True,
                digest=wanted.digest,
                version=wanted.version + 1,
                num_ended=0,
            )
        unloaded: list[Unloaded] = []

        async def locally() -> None:
            ref = AdapterRef(model.card.name, tenant, ByName(name))
            if model.store.find(ref) is not None:
                unloaded.append(await self._catalog.remove(model, ref, mode))

        await self._declare_next(wanted, locally, is_removed=True, aliases=())
        return Unloaded(
            name=name,
            is_alias=False,
            digest=unloaded[0].digest if unloaded else wanted.digest,
            version=wanted.version + 1,
            num_ended=unloaded[0].num_ended if unloaded else 0,
        )

    async def alias(
        self, model: ServedModel, tenant: str, version: AdapterVersion, alias: str
    ) -> AdapterVersion:
        """Declare one more alias. Raises AdapterExistsError for a name that is taken."""
        check_name(alias)
        await self._declared.refresh()
        key = model.card.name, tenant, version.name
        wanted = self._declared.wanted.get(key)
        if wanted is None:
            raise AdapterExistsError(
                f"adapter {version.name!r} is not declared, so other servers do not have it: load "
                "it again",
                param="name",
            )
        if alias not in wanted.aliases:
            taken = self._find(model, tenant, ByName(alias))
            if taken is not None or model.store.find(AdapterRef(*key[:2], ByName(alias))):
                of = version.name if taken is None else taken.name
                raise AdapterExistsError(
                    f"{alias!r} already means adapter {of!r}: unload that first", param="alias"
                )
            await self._declare_next(wanted, aliases=(*wanted.aliases, alias))
        return await self._declared.bind(key, tenant)

    async def _declare_next(
        self,
        wanted: Declaration,
        locally: Callable[[], Awaitable[object]] | None = None,
        **changes: object,
    ) -> None:
        following = msgspec.structs.replace(
            wanted, version=wanted.version + 1, created=int(time.time()), **changes
        )
        await self._declared.declare(following, locally)

    def _find(self, model: ServedModel, tenant: str, key: AdapterKey) -> Declaration | None:
        """Return the declaration of an adapter, bound or not."""
        wanted = self._declared.wanted
        version = model.store.find(AdapterRef(model.card.name, tenant, key))
        if version is not None:
            return wanted.get((model.card.name, tenant, version.name))
        found = model.discovered.find(key, tenant)
        return None if found is None else found.declaration

    def _check_free(
        self, model: ServedModel, key: DeclaredName, task_id: int | None, *, replace: bool
    ) -> None:
        _, tenant, name = key
        model.store.check_free(model.card.name, tenant, name, task_id, replace=replace)
        present = self._declared.wanted.get(key)
        if present is not None and not replace:
            raise AdapterExistsError(
                f"adapter {name!r} already exists (version {present.version}, digest "
                f"{present.digest[:12]}); remove it first, or replace it",
                param="name",
            )
        own = model.store.find(AdapterRef(model.card.name, tenant, ByName(name)))
        found = model.discovered.find(ByName(name), tenant)
        is_configured = own is not None and own.origin is VersionOrigin.CONFIGURED
        if is_configured or (found is not None and found.declaration is None):
            raise AdapterExistsError(
                f"adapter {name!r} is configured on this server: load under another name",
                param="name",
            )
        if found is not None and found.name != name:
            raise AdapterExistsError(
                f"{name!r} is an alias of adapter {found.name!r}; load under that name, or remove "
                "the alias first",
                param="name",
            )


def check_may_roll_back(version: AdapterVersion | None) -> None:
    """Raise UnsupportedFeatureError for a declared adapter: others may not have its old bytes."""
    if version is not None and version.origin is VersionOrigin.DECLARED:
        raise UnsupportedFeatureError(
            f"adapter {version.name!r} is declared for several servers: load the source of the "
            "older version under its name (replace)"
        )
