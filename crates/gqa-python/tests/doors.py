"""The edges that all doors agree about, tests/cases/doors/edges.json: their calls and results."""

import json
import pathlib

import gqa
import numpy as np

HEADS, KV_HEADS, SIZE = 4, 2, 16
_PLACES = "tests/cases/doors/edges.json", "cases/doors/edges.json"


def edges():
    """All of them, from the sources or from a bundle for GPU machines."""
    folders = pathlib.Path(__file__).resolve().parents
    files = [folder / place for folder in folders for place in _PLACES]
    return json.loads(next(file for file in files if file.is_file()).read_text())


class Edge:
    """A call of the package, on arrays of numpy that ``given`` makes those of a library."""

    def __init__(self, edge, dtype=np.float32):
        self.edge, self.dtype = edge, dtype
        self.rows, self.keys = edge["rows"], edge["keys"]
        self.named = {"causal": edge.get("causal", False)}
        if "window" in edge:
            self.named["window_size"] = tuple(edge["window"])
        if edge.get("sink"):
            self.named["s_aux"] = np.zeros(HEADS, dtype)
        getattr(self, "_" + edge["call"])()
        self.named |= edge.get("options", {})

    def _values(self, numbers):
        """Keys of 0 and values of these numbers, of any shape; both NaN where these are."""
        shape = *np.shape(numbers), KV_HEADS, SIZE
        values = np.broadcast_to(np.array(numbers, self.dtype)[..., None, None], shape).copy()
        return values * 0, values

    def _rows_of_heads(self, *shape):
        return np.zeros((*shape, HEADS, SIZE), self.dtype)

    def _dense(self):
        self.function = gqa.flash_attn_func
        batch = len(self.rows)
        rows, keys = (max(all, default=self.edge.get(most, 0)) for all, most in (
            (self.rows, "most_rows"), (self.keys, "most_keys")))
        numbers = np.broadcast_to(np.arange(keys) + 1.0, (batch, keys))
        self.tensors = self._rows_of_heads(batch, rows), *self._values(numbers)

    def _blocks(self, sequences, rows):
        """Rows of sequences, which are equally many, in blocks; and the table of these."""
        block = self.edge["block"]
        count, columns = len(sequences), -(-rows // block)
        padded = np.full((count, columns * block), np.nan)
        padded[:, :rows] = sequences
        table = np.arange(count * columns, dtype=np.int32)[::-1].reshape(count, columns)
        blocks = np.full((count * columns + 1, block), np.nan)
        blocks[table.ravel()] = padded.reshape(-1, block)
        return blocks, np.ascontiguousarray(table)

    def _varlen(self):
        self.function = gqa.flash_attn_varlen_func
        starts = np.cumsum([0, *self.rows], dtype=np.int32)
        key_starts = np.cumsum([0, *self.keys], dtype=np.int32)
        q = self._rows_of_heads(starts[-1] + self.edge.get("rows_behind", 0))
        numbers = [np.arange(keys) + 1.0 for keys in self.keys]
        if "block" in self.edge:
            most = max(max(self.keys), 1)
            padded = [np.pad(x, (0, most - len(x)), constant_values=np.nan) for x in numbers]
            numbers, self.named["block_table"] = self._blocks(np.array(padded), most)
        else:
            behind = np.full(self.edge.get("keys_behind", 0), np.nan)
            numbers = np.concatenate([*numbers, behind])
        self.tensors = q, *self._values(numbers), starts
        self.named["max_seqlen_q"] = max(self.rows, default=0)
        self.named["max_seqlen_k"] = max(self.keys, default=0)
        if self.edge.get("seqused"):
            self.named["seqused_k"] = np.array(self.keys, np.int32)
        else:
            self.named["cu_seqlens_k"] = key_starts

    def _cache(self):
        self.function = gqa.flash_attn_with_kvcache
        batch, capacity = len(self.rows), self.edge["capacity"]
        rows = max(self.rows, default=self.edge.get("most_rows", 0))
        numbers = np.full((batch, capacity), np.nan)
        for b, keys in enumerate(self.keys):
            held = max(min(keys, capacity), 0)
            numbers[b, :held] = np.arange(held) + 1
        if "block" in self.edge:
            numbers, self.named["block_table"] = self._blocks(numbers, capacity)
        self.tensors = self._rows_of_heads(batch, rows), *self._values(numbers)
        self.named["cache_seqlens"] = np.array(self.keys, np.int32)
        if "new" in self.edge:
            places = np.array(self.keys, np.int64)[:, None] + np.arange(self.edge["new"]) + 1.0
            self.named |= zip("kv", self._values(places))

    def call(self, given, taken):
        """The output and log-sum-exps."""
        named = {name: given(value) for name, value in self.named.items()}
        tensors = [given(tensor) for tensor in self.tensors]
        out = self.function(*tensors, **named, return_softmax_lse=True)
        return tuple(taken(x) for x in out)

    def expected(self):
        """Output and log-sum-exps of a head, (rows of all sequences), as the list has them."""
        seen = [keys for sequence in self.edge["seen"] for keys in sequence]
        seen += [(0, 0)] * self.edge.get("rows_behind", 0)
        firsts, ends = np.array(seen, np.float64).reshape(-1, 2).T
        counts = ends - firsts
        sums = (firsts + 1 + ends) * counts / 2
        behind = np.arange(len(seen)) >= sum(self.rows)
        sinks = np.where(behind, 0, float(self.edge.get("sink", False)))
        with np.errstate(divide="ignore"):
            return sums / np.maximum(counts + sinks, 1), np.log(counts + sinks)

    def check(self, given, taken):
        """Errs unless the call gives, or refuses, what the list says."""
        if "refused" in self.edge:
            try:
                self.call(given, taken)
            except (TypeError, ValueError) as error:
                assert str(error).startswith(f"{self.edge['refused']}: got "), str(error)
                assert "; allowed: " in str(error), str(error)
                return
            raise AssertionError(f"{self.edge['refused']} was not refused")
        out, lse = self.call(given, taken)
        assert out.shape == self.tensors[0].shape and lse.dtype == np.float32
        if lse.ndim == 3:
            lse = lse.transpose(1, 0, 2).reshape(HEADS, -1)
        wanted, wanted_lse = self.expected()
        wanted = np.broadcast_to(wanted[:, None, None], (len(wanted), HEADS, SIZE))
        out = out.reshape(-1, HEADS, SIZE).astype(np.float64)
        np.testing.assert_allclose(out, wanted, atol=1e-6, rtol=2e-3)
        wanted_lse = np.broadcast_to(wanted_lse, (HEADS, len(wanted_lse)))
        np.testing.assert_allclose(lse, wanted_lse, atol=1e-4, rtol=1e-4)
