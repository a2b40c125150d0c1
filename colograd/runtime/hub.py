"""Whether a model's or a dataset's name leads anywhere: asked briefly, before libraries ask for many files and try each
again.

Imports huggingface_hub only for what isn't a folder.
"""

from __future__ import annotations

import os
import time

ATTEMPTS = 2
SECONDS = 5.0  # that one of them may take


def check_model_name(name: str, revision: str | None = None) -> None:
    """Raise where loading would fail after minutes: a folder that isn't there, a Hub id of nothing, no connection.

    What is in the Hub's cache counts as there. Whatever else may be wrong, loading tells.

    Args:
        name: a folder or a Hub id.

    Raises:
        ValueError: with the value, the rule and the remedy.
    """
    if os.path.isdir(name):
        return
    why = f"there is no such folder (looked from {os.getcwd()})"
    if name.startswith((os.sep, ".", "~")) or name.count("/") > 1:
        raise _nothing_there(name, why)
    import httpx
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        url = hf_hub_url(name, "config.json", revision=revision)
    except HFValidationError:
        raise _nothing_there(name, f"{why}, and no Hub id looks like that") from None
    why += ", nothing in the Hub's cache"
    if constants.HF_HUB_OFFLINE:
        raise _nothing_there(name, f"{why}, and HF_HUB_OFFLINE is set")
    for attempt in range(ATTEMPTS):
        try:
            get_hf_file_metadata(url, timeout=SECONDS)
            return
        except GatedRepoError:
            raise ValueError(
                f"The model {name!r} is on the Hub, but not for everybody: ask for access on its page, then `hf auth "
                "login`, or set HF_TOKEN."
            ) from None
        except RepositoryNotFoundError:
            unknown = "no such model on the Hub, or a private one (then `hf auth login`, or set HF_TOKEN)"
            raise _nothing_there(name, f"{why}, and {unknown}") from None
        except (httpx.TransportError, ConnectionError, TimeoutError) as error:
            if attempt == ATTEMPTS - 1:
                raise _nothing_there(name, f"{why}, and the Hub can't be reached: {error}") from None
            time.sleep(1.0)
        except Exception:  # a Hub that is busy, or a model without this file: loading tries more, and says more
            return


def _nothing_there(name: str, why: str) -> ValueError:
    return ValueError(
        f"The model {name!r} is neither a folder with a model nor a Hub model that can be loaded: {why}. Give "
        "model_name_or_path a folder that save_pretrained wrote, or a Hub id; `make model` makes the quickstart's."
    )


def check_dataset_name(name: str, cache: str | None = None) -> None:
    """Raise where there is no connection to load a dataset by, nor a copy of it: `datasets` would try for minutes.

    Args:
        name: a Hub id, or a builder of `datasets` (`json`, `imagefolder`), which needs no Hub.
        cache: the folder of copies; default: that of `datasets`.

    Raises:
        ConnectionError: the Hub can't be reached.
    """
    import datasets
    import httpx
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as BUILDERS
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    *owner, own = name.split("/")
    stored = os.path.join(cache or datasets.config.HF_DATASETS_CACHE, "___".join([*owner, camelcase_to_snakecase(own)]))
    if name in BUILDERS or constants.HF_HUB_OFFLINE or os.path.isdir(stored):
        return
    for attempt in range(ATTEMPTS):
        try:
            get_hf_file_metadata(hf_hub_url(name, "README.md", repo_type="dataset"), timeout=SECONDS)
            return
        except (httpx.TransportError, ConnectionError, TimeoutError) as error:
            if attempt == ATTEMPTS - 1:
                raise ConnectionError(f"it isn't in the cache, and the Hub can't be reached: {error}") from None
            time.sleep(1.0)
        except Exception:  # whatever else may be wrong, loading tells
            return
