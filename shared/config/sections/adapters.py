"""Adapters: where they are, and how many are served at once."""

from typing import Annotated

from shared.config.section import Section, advanced, common
from shared.errors import ConfigError

MAX_LORA_RANK = 256


class AdapterSettings(Section, frozen=True, kw_only=True):
    TITLE = "Adapters"
    lora_modules: Annotated[
        str,
        common(
            "LoRA adapters that are served from the start: name=directory, separated by commas. A request names one as "
            "its model."
        ),
    ] = ""
    lora_dir: Annotated[
        str,
        common("A directory of LoRA adapters, each in a directory of its name: one that a request names is loaded."),
    ] = ""
    max_loras: Annotated[
        int, advanced("Most adapters in one step of a worker; requests with others wait. 0: adapters are not served.")
    ] = 8
    max_lora_rank: Annotated[int, advanced("The largest rank of an adapter, up to 256.")] = 64
    max_cpu_loras: Annotated[
        int, advanced("Most adapters that a worker holds; one that no request uses makes room. 0: 4 times max_loras.")
    ] = 0

    def modules(self) -> dict[str, str]:
        """The directories of lora_modules by name.  Raises ConfigError."""
        found: dict[str, str] = {}
        for one in filter(None, (part.strip() for part in self.lora_modules.split(","))):
            name, equals, directory = (piece.strip() for piece in one.partition("="))
            if not (name and equals and directory):
                raise ConfigError(f"lora_modules: {one!r} is not name=directory")
            if name in found:
                raise ConfigError(f"lora_modules: {name!r} is named twice")
            found[name] = directory
        return found

    @property
    def num_held(self) -> int:
        """Adapters that a worker holds."""
        return self.max_cpu_loras or 4 * self.max_loras
