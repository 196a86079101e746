"""Our side through the C API (runtime/runtime.h) of libk3pack.so, in this process: memory is the tensors' own, streams are passed in."""
import contextlib
import ctypes as c
import json
import mmap
import struct

DTYPES = {}  # filled by Library: name -> enum k3_dtype


class Array(c.Structure):
    _fields_ = [("data", c.c_void_p), ("memory", c.c_int), ("dtype", c.c_int), ("row_nbytes", c.c_uint64)]


class EngineOptions(c.Structure):
    _fields_ = [("backend", c.c_char_p), ("device", c.c_int), ("tp_rank", c.c_int), ("tp_size", c.c_int), ("comm", c.c_void_p),
                ("block_width", c.c_uint64), ("embed_tokens", Array), ("lm_head", Array), ("check_digests", c.c_bool), ("progress", c.c_void_p)]


class EngineInfo(c.Structure):
    _fields_ = [(n, c.c_uint64) for n in ("hidden_size", "target_hidden_size", "n_taps", "n_layers", "row_width", "latent_rank", "vocab_size",
                                          "max_positions", "mask_token_id", "block_width", "image_block_width")] + [
        ("memory", c.c_int), ("activation_dtype", c.c_int), ("has_embedding", c.c_bool), ("has_head", c.c_bool), ("has_confidence", c.c_bool),
        ("context_nbytes", c.c_uint64), ("draft_nbytes", c.c_uint64), ("start_seconds", c.c_double), ("load_seconds", c.c_double),
        ("load_nbytes", c.c_uint64), ("load_reads", c.c_uint), ("identity", c.c_char * 65)]


class Cache(c.Structure):
    _fields_ = [("memory", c.c_int), ("dtype", c.c_int), ("layers", c.POINTER(c.c_void_p)), ("scales", c.POINTER(c.c_float))] + [
        (n, c.c_uint64) for n in ("n_blocks", "block_size", "block_nbytes", "row_nbytes")]


class SessionOptions(c.Structure):
    _fields_ = [("max_requests", c.c_uint64), ("max_context_rows", c.c_uint64), ("max_keys", c.c_uint64), ("n_threads", c.c_int),
                ("progress", c.c_void_p)]


class Context(c.Structure):
    _fields_ = [("n_rows", c.c_uint64), ("taps", c.POINTER(Array)), ("n_tap_arrays", c.c_uint64), ("positions", c.c_void_p), ("slots", c.c_void_p),
                ("slots_layer_stride", c.c_uint64), ("states", Array), ("rows", Array)]


class Draft(c.Structure):
    _fields_ = [("n_requests", c.c_uint64), ("anchor_ids", c.c_void_p), ("anchor_positions", c.c_void_p), ("block_tables", c.c_void_p),
                ("max_blocks", c.c_uint64), ("previous_ids", c.c_void_p), ("draft_ids", Array), ("confidence", Array), ("hidden", Array),
                ("base_logits", Array), ("logits", Array)]


class Measure(c.Structure):
    _fields_ = [("calls", c.c_bool), ("steps", c.c_bool), ("cold", c.c_bool), ("only_step", c.c_char_p)]


class StepTime(c.Structure):
    _fields_ = [("step", c.c_char_p), ("n_calls", c.c_uint64), ("weight_nbytes", c.c_uint64), ("activation_nbytes", c.c_uint64),
                ("seconds", c.c_double)]


class CallTime(c.Structure):
    _fields_ = [("seconds", c.c_double), ("steps", c.POINTER(StepTime)), ("n_steps", c.c_size_t)]


# Each struct by its name in runtime/runtime.h.
STRUCTS = {"k3_array": Array, "k3_engine_options": EngineOptions, "k3_engine_info": EngineInfo, "k3_cache": Cache,
           "k3_session_options": SessionOptions, "k3_context": Context, "k3_draft": Draft, "k3_measure": Measure, "k3_step_time": StepTime,
           "k3_call_time": CallTime}


def layout_in_c():
    """A C program that fails to compile when a struct here is not the one of runtime/runtime.h: other fields, places or sizes."""
    lines = ["#include \"runtime/runtime.h\""]
    for name, mirror in STRUCTS.items():
        lines.append(f'_Static_assert(sizeof(struct {name}) == {c.sizeof(mirror)}, "size of {name}");')
        for field, _ in mirror._fields_:
            at = getattr(mirror, field).offset
            lines.append(f'_Static_assert(offsetof(struct {name}, {field}) == {at}, "{name}.{field}");')
    return "\n".join(lines + ["int main(void) { return 0; }", ""])


class Error(Exception):
    pass


class Library:
    def __init__(self, path):
        self.c = c.CDLL(path)
        for name in ("k3_engine_open", "k3_engine_info", "k3_session_create", "k3_error_text", "k3_dtype_name"):
            getattr(self.c, name).restype = c.c_void_p
        self.c.k3_dtype_name.restype = self.c.k3_error_text.restype = c.c_char_p
        while "U64" not in DTYPES:  # the last
            DTYPES[self.c.k3_dtype_name(len(DTYPES)).decode()] = len(DTYPES)
        self.error = c.create_string_buffer(1 << 16)  # a struct k3_error, whose inside is not looked at

    def fail(self):
        text = c.create_string_buffer(4096)
        raise Error(self.c.k3_error_text(self.error, text, len(text)).decode())

    def check(self, status):
        if status != 0:
            self.fail()


def array(tensor, dtype, memory, row_nbytes=0):
    return Array(tensor.data_ptr() if tensor is not None else None, memory, DTYPES[dtype], row_nbytes)


class Engine:
    """An image on a backend. `lend` are tensors [V, H] in BF16 that take the place of the image's embedding and head."""

    def __init__(self, library, image, backend, embed_tokens=None, lm_head=None):
        memory = 1 if backend == "cuda" else 0
        options = EngineOptions(backend=backend.encode())
        self.lent = embed_tokens, lm_head
        if embed_tokens is not None:
            options.embed_tokens = array(embed_tokens, "BF16", memory)
        if lm_head is not None:
            options.lm_head = array(lm_head, "BF16", memory)
        self.library, self.memory = library, memory
        self.handle = c.c_void_p(library.c.k3_engine_open(str(image).encode(), c.byref(options), library.error))
        if not self.handle:
            library.fail()
        self.info = c.cast(library.c.k3_engine_info(self.handle), c.POINTER(EngineInfo)).contents

    def close(self):
        self.library.c.k3_engine_free(self.handle)


class Session:
    """A session with a cache of the caller's: `layers`, a list of tensors [blocks, block_size, E]."""

    def __init__(self, engine, layers, max_requests, max_context_rows, max_keys, n_threads=1):
        self.engine, self.library, self.layers, self.kept = engine, engine.library, layers, []
        options = SessionOptions(max_requests=max_requests, max_context_rows=max_context_rows, max_keys=max_keys, n_threads=n_threads)
        self.handle = c.c_void_p(self.library.c.k3_session_create(engine.handle, c.byref(options), self.library.error))
        if not self.handle:
            self.library.fail()
        first = layers[0]
        bases = (c.c_void_p * len(layers))(*(t.data_ptr() for t in layers))
        self.cache = Cache(memory=engine.memory, dtype=engine.info.activation_dtype, layers=bases, n_blocks=first.shape[0], block_size=first.shape[1],
                           block_nbytes=first.stride(0) * first.element_size(), row_nbytes=first.stride(1) * first.element_size())
        self.bases = bases

    def close(self):
        self.library.c.k3_session_free(self.handle)

    def measure(self, only_step=None):
        """The following calls take this step alone; None: all."""
        self.only = Measure(only_step=only_step.encode() if only_step else None)
        self.library.c.k3_session_measure(self.handle, c.byref(self.only))

    def step_bytes(self, call):
        """name -> (calls, weight bytes, activation bytes) of one call."""
        times = CallTime()
        self.library.c.k3_session_measure(self.handle, c.byref(Measure(calls=True)))
        call()
        self.library.check(self.library.c.k3_session_times(self.handle, c.byref(times), self.library.error))
        found = {times.steps[i].step.decode(): (times.steps[i].n_calls, times.steps[i].weight_nbytes, times.steps[i].activation_nbytes)
                 for i in range(times.n_steps)}
        self.measure()
        return found

    def bandwidth(self):
        value = c.c_double()
        self.library.check(self.library.c.k3_session_bandwidth(self.handle, c.byref(value), self.library.error))
        return value.value

    def append_call(self, taps, positions, slots, states=None, rows=None):
        """A function(stream) that appends. taps [n, A * Ht]; states [n, H], rows [L, n, E] F32 outputs, or None."""
        memory = self.engine.memory
        tap = array(taps, {2: "BF16", 4: "F32"}[taps.element_size()], memory)
        context = Context(n_rows=taps.shape[0], taps=c.pointer(tap), n_tap_arrays=1, positions=positions.data_ptr(), slots=slots.data_ptr(),
                          states=array(states, "F32", memory), rows=array(rows, "F32", memory))
        self.kept.append((taps, positions, slots, states, rows, tap, context))
        return self.caller(self.library.c.k3_session_append, context)

    def draft_call(self, anchor_ids, anchor_positions, tables, draft_ids=None, hidden=None, base_logits=None, logits=None):
        """A function(stream) that drafts, with the outputs that are there."""
        memory = self.engine.memory
        draft = Draft(n_requests=anchor_ids.shape[0], anchor_ids=anchor_ids.data_ptr(), anchor_positions=anchor_positions.data_ptr(),
                      block_tables=tables.data_ptr(), max_blocks=tables.shape[1], draft_ids=array(draft_ids, "I64", memory),
                      confidence=array(None, "F32", memory), hidden=array(hidden, "F32", memory), base_logits=array(base_logits, "F32", memory),
                      logits=array(logits, "F32", memory))
        self.kept.append((anchor_ids, anchor_positions, tables, draft_ids, hidden, base_logits, logits, draft))
        return self.caller(self.library.c.k3_session_draft, draft)

    def caller(self, function, parameters):
        """A function(stream). Without a stream the session uses its own, which knows nothing of what the tensors' still have to do: that is waited for."""
        import torch

        def call(stream=None):
            if stream is None and torch.cuda.is_available():
                torch.cuda.synchronize()
            self.library.check(function(self.handle, c.byref(self.cache), c.byref(parameters), c.c_void_p(stream), self.library.error))
        return call


class Image:
    """An image read as what it is, a safetensors file: header, manifest, bytes of tensors."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        n = struct.unpack("<Q", self.bytes[:8])[0]
        self.header = json.loads(self.bytes[8:8 + n])
        self.begin = 8 + n
        self.manifest = json.loads(self.part("__k3pack__"))
        self.model = self.manifest["model"]

    def part(self, name):
        begin, end = self.header[name]["data_offsets"]
        return self.bytes[self.begin + begin:self.begin + end]

    def tensor(self, name, device):
        """As a torch tensor of its dtype, on a device."""
        import torch
        dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
        t = self.header[name]
        begin, end = t["data_offsets"]
        flat = torch.frombuffer(bytearray(self.bytes[self.begin + begin:self.begin + end]), dtype=torch.uint8)
        return flat.view(dtypes[t["dtype"]]).view(t["shape"]).to(device)

    def has(self, name):
        return name in self.header


@contextlib.contextmanager
def closing(*things):
    try:
        yield things
    finally:
        for thing in things:
            thing.close()
