"""Quick checks of model and dataset names before loading, because libraries would retry requests for minutes."""

from __future__ import annotations

import os
import time

ATTEMPTS = 2
SECONDS = 5.0  # Time limit of one request to the Hub.


def check_model_name(name: str, revision: str | None = None) -> None:
    if os.path.isdir(name):
        return
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    why = f"there is no such folder (looked from {os.getcwd()})"
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        url = hf_hub_url(name, "config.json", revision=revision)
        why += ", nothing in the Hub's cache, and "
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        _ask_hub(url)
        return
    except HFValidationError:
        why += ", and a Hub id can't have such a name"
    except GatedRepoError:
        raise ValueError(
            f"The model {name!r} is on the Hub, but only for users with access: request access on its page, then run "
            "`hf auth login` or set HF_TOKEN."
        ) from None
    except RepositoryNotFoundError:
        why += "no such model on the Hub, or a private one (then `hf auth login`, or set HF_TOKEN)"
    except ConnectionError as error:
        why += str(error)
    except Exception:  # Loading the model will give a clearer error.
        return
    raise ValueError(
        f"The model {name!r} is neither a folder with a model nor a Hub model that can be loaded: {why}. Name "
        "a folder that save_pretrained wrote, or a Hub id. `make model`, or `python -m "
        "colograd.apps.quickstart.quickstart`, makes the model of the quickstart."
    )


def check_dataset_name(name: str, cache: str | None = None) -> None:
    import datasets
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as BUILDERS
    from huggingface_hub import constants, hf_hub_url

    *owner, own = name.split("/")
    stored = os.path.join(cache or datasets.config.HF_DATASETS_CACHE, "___".join([*owner, camelcase_to_snakecase(own)]))
    if name in BUILDERS or constants.HF_HUB_OFFLINE or os.path.isdir(stored):
        return
    try:
        _ask_hub(hf_hub_url(name, "README.md", repo_type="dataset"))
    except ConnectionError as error:
        raise ConnectionError(f"the dataset isn't in the cache, and {error}") from None
    except Exception:  # `datasets` reports every error that prevents the loading.
        return


def _ask_hub(url: str) -> None:
    import httpx
    from huggingface_hub import get_hf_file_metadata

    for attempt in range(ATTEMPTS):
        try:
            get_hf_file_metadata(url, timeout=SECONDS)
            return
        except (httpx.TransportError, ConnectionError, TimeoutError) as error:
            if attempt == ATTEMPTS - 1:
                raise ConnectionError(f"the Hub can't be reached: {error}") from None
            time.sleep(1.0)
