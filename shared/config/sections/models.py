"""How one of several models shares the machine with the others: when it sleeps, and when it makes room."""

from typing import Annotated

from shared.config.section import Section, advanced, common


class ModelsSettings(Section, frozen=True, kw_only=True):
    TITLE = "Several models"
    sleep_after: Annotated[
        float,
        common(
            "Seconds without a request after which a model sleeps: its workers end and their memory is given back, and "
            "the next request wakes it. 0: never. See docs/models.md."
        ),
    ] = 0.0
    max_awake_models: Annotated[
        int,
        advanced("Most models in memory at a time; a request for another one waits until one makes room. 0: all."),
    ] = 0
    pinned: Annotated[bool, advanced("The model stays in memory, whatever others need.")] = False
    model_turn: Annotated[
        float,
        advanced("Seconds that a model with requests stays in memory while another with requests waits for its place."),
    ] = 30.0
    models_file: Annotated[
        str, advanced("File with the further models of the deployment, for gateways. `pageant serve` writes it.")
    ] = ""
    activity_dir: Annotated[
        str,
        advanced(
            "Directory in which the scheduler says how many requests its model has, and reads whether the model "
            "sleeps. `pageant serve` sets it."
        ),
    ] = ""
