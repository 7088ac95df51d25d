"""Whether the Hub has a model: asked once per name, and briefly.

Its client retries every file for half a minute where there is no network, whether the file is in the cache or not.
"""

from __future__ import annotations

from functools import cache

from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

from executors.errors import one_line

PATIENCE_S = 5.0


@cache
def fault(name: str) -> str:
    """Why files cannot come from the Hub; "" where they can. Then what is in its cache may still do."""
    try:
        HfApi().model_info(name, timeout=PATIENCE_S)
    except GatedRepoError:
        return "the Hub asks for a token for it"
    except RepositoryNotFoundError:
        return "the Hub has no such model, or asks for a token for it"
    except HFValidationError:
        return "it is no name that the Hub could have"
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except Exception as cause:  # the client's, its transport's, the network's
        return f"the Hub cannot be reached ({one_line(cause)})"
    return ""
