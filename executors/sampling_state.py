"""What the sampler keeps on the device for each row: token counts, and edits of logits.

Both change on the compute lane only. Counts take up 4 bytes per row and token of the vocabulary, so they are allocated
when the first request needs them, or ahead of capturing a graph that reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executors.noise import token_hashes
from executors.sampling_layout import MAX_EDITS, Features, Resets


class SamplerState:
    """State of `capacity` rows and of the padding row.

    counts       int32[capacity + 1, V]  occurrences in the output, plus IN_PROMPT where the prompt has the token
    edit_tokens  int64[capacity + 1, MAX_EDITS]  tokens whose logits are edited
    edit_values  float32[capacity + 1, MAX_EDITS]  what is added to them
    hashes       int32[V]  the tokens' share of the noise
    """

    def __init__(self, capacity: int, vocab_size: int, device: torch.device, *, max_logprobs: int = 20) -> None:
        self.vocab_size = vocab_size
        self.num_logprobs = min(max_logprobs, vocab_size)
        self.hashes = token_hashes(vocab_size, device)
        self.counts = torch.empty(0, dtype=torch.int32, device=device)
        self.edit_tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.edit_values = torch.empty(0, dtype=torch.float32, device=device)
        self._num_rows = capacity + 1

    def allocate(self, features: int) -> None:
        """Makes room for what these features keep. Runs on the current stream; does nothing the second time."""
        if features & Features.PENALTIES and not self.counts.numel():
            self.counts = self.counts.new_zeros(self._num_rows, self.vocab_size)
        if features & Features.EDITS and not self.edit_tokens.numel():
            self.edit_tokens = self.edit_tokens.new_zeros(self._num_rows, MAX_EDITS)
            self.edit_values = self.edit_values.new_zeros(self._num_rows, MAX_EDITS)

    def reset(self, words: Tensor, resets: Resets) -> None:
        """Applies `resets`; `words`, int32, is the device's copy of `resets.words`."""
        sizes = [resets.num_rows, 3 * resets.num_counts, 4 * resets.num_edits]
        rows, counts, edits = torch.split(words[: sum(sizes)], sizes)
        if resets.num_rows:
            self.allocate(Features.PENALTIES)
            row, token, value = counts.view(-1, 3).unbind(1)
            self.counts.index_fill_(0, rows.long(), 0)
            self.counts.view(-1).index_copy_(0, row.long() * self.vocab_size + token, value)
        if resets.num_edits:
            self.allocate(Features.EDITS)
            row, index, token, value = edits.view(-1, 4).unbind(1)
            places = row.long() * MAX_EDITS + index
            self.edit_tokens.view(-1).index_copy_(0, places, token.long())
            self.edit_values.view(-1).index_copy_(0, places, value.contiguous().view(torch.float32))

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Adds sampled tokens, int64[m], to the counts of rows int32[m]; a negative token is none."""
        places = rows.long() * self.vocab_size + tokens.clamp(min=0)
        self.counts.view(-1).scatter_add_(0, places, (tokens >= 0).to(torch.int32))
