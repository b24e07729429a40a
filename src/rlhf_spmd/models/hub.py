"""Models by name: a directory here, or one of the Hugging Face hub, through its client's cache, offline mode and token."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from rlhf_spmd.models.stored import ADAPTER_CONFIG, read_json
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE, EXPORT_DIR

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SMALL = ["*.json", "*.jinja", "*.txt", "*.model"]  # configuration and tokenizer
WEIGHTS = ["*.safetensors"]
# folders below the model's own have copies in other formats, but for a tokenizer's named templates
TEMPLATES = "additional_chat_templates/"
FOLDERS = [f"{TEMPLATES[:i]}[!{letter}]*/*" for i, letter in enumerate(TEMPLATES)]


def local_directory(path: str, key: str, weights: bool = True) -> str:
    """Return the directory of the model ``path``, with ``~`` expanded. A model of the hub that is not in the cache is downloaded,
    without ``weights`` its configuration and tokenizer alone. ``key``: the setting that names it. One process of a host downloads,
    the others wait for it.

    Raises ValueError if it is neither a directory nor to be had.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        if (directory / "config.json").is_file():
            return str(directory)
        for run in (directory, *directory.absolute().parents[:2]):  # a checkpoint is a run's checkpoints/NAME
            if (run / CONFIG_FILE).is_file() and (run == directory or (run / "checkpoints").is_dir()):
                raise ValueError(
                    f"{key}={path} has no config.json: it is of a run, which writes its model into {run / EXPORT_DIR}; give that"
                )
        if (directory / ADAPTER_CONFIG).is_file():
            base = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
            raise ValueError(f"{key}={path} holds adapters of {base}, not a model; of a run, its export/ has both in one")
        return str(directory)
    if not NAME.fullmatch(path) or directory.parent.is_dir():  # a slip in a path must not fetch a stranger's model
        raise ValueError(
            f"{key}={path} is not a directory, nor the name of a model on the Hugging Face hub (ORGANISATION/NAME, where no directory "
            "ORGANISATION is here)"
        )
    from filelock import FileLock
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if cached := _cached(path, weights):
        return cached
    cache = Path(constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{path.replace('/', '--')}.lock"):
            if cached := _cached(path, weights):
                return cached
            return str(_snapshot(path, weights, only_cached=False))
    except GatedRepoError as error:
        raise ValueError(f"{key}={path}: its owners let in only who has asked; ask on the hub, then `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{key}={path} is neither a directory nor a model on the hub (a private one needs `hf auth login`)"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else str(error.__cause__ or error).splitlines()[0]
        raise ValueError(
            f"{key}={path} is not a directory, is not in the cache {cache}, and cannot be downloaded ({why}); where there is a network "
            f"run `hf download {path} --local-dir DIR` and set {key}=DIR"
        ) from error


def _snapshot(name: str, weights: bool, only_cached: bool) -> Path:
    """Return the directory of a model in the hub's cache. Both calls name the same files: the client misses in its cache what was never
    chosen."""
    from huggingface_hub import snapshot_download

    patterns = SMALL + WEIGHTS * weights
    return Path(snapshot_download(name, local_files_only=only_cached, allow_patterns=patterns, ignore_patterns=FOLDERS))


def _cached(name: str, weights: bool) -> str | None:
    """Return the directory of a model in the hub's cache; None if a file is missing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        snapshot = _snapshot(name, weights, only_cached=True)
        index = snapshot / "model.safetensors.index.json"
        files = ["config.json"]
        if weights:
            several = not (snapshot / "model.safetensors").is_file()
            files += read_json(index)["weight_map"].values() if several else ["model.safetensors"]
        if all((snapshot / file).is_file() for file in files):
            return str(snapshot)
    return None
