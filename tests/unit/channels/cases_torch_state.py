"""State of torch and of the process: modes, flags, environment, contexts, threads."""

from unit.channels.channel import Family

FAMILY = Family("torch and process state")
case = FAMILY.case

# --- torch --------------------------------------------------------------------------------------

case(
    "grad mode",
    """
    call = nn.Linear(4, 4)
    """,
    writes=["torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"],
)
case(
    "grad mode read by the program",
    """
    def call(x):
        return x * 2 if torch.is_grad_enabled() else x
    """,
    writes=["torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"],
)
case(
    "inference mode",
    """
    layer = nn.Linear(4, 4)
    def call(x):
        y = layer(x)
        return y, y.is_inference(), torch.is_inference_mode_enabled()
    """,
    writes=["modes.enter_context(torch.inference_mode())", "modes.close()"],
)
case(
    "autocast on, off",
    """
    call = nn.Linear(4, 4)
    """,
    writes=["modes.enter_context(torch.autocast('cpu', torch.bfloat16))", "modes.close()"],
)
case(
    "autocast to another dtype",
    """
    def call(x):
        return torch.mm(x[None], torch.ones(4, 4))
    """,
    writes=[
        "modes.enter_context(torch.autocast('cpu', torch.bfloat16))",
        "modes.enter_context(torch.autocast('cpu', torch.float16))",
        "modes.close()",
    ],
)
case(
    "autocast read by the program",
    """
    def call(x):
        return x * 2 if torch.is_autocast_enabled("cpu") else x
    """,
    writes=["modes.enter_context(torch.autocast('cpu', torch.bfloat16))", "modes.close()"],
)
case(
    "default dtype",
    """
    def call(x):
        return x + torch.ones(4)
    """,
    writes=["torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"],
)
case(
    "default dtype read by the program",
    """
    def call(x):
        return x.to(torch.get_default_dtype())
    """,
    writes=["torch.set_default_dtype(torch.float64)"],
)
case(
    "deterministic flag read by the program",
    """
    def call(x):
        return x * 2 if torch.are_deterministic_algorithms_enabled() else x
    """,
    writes=[
        "torch.use_deterministic_algorithms(True)",
        "torch.use_deterministic_algorithms(False)",
    ],
)
case(
    "matmul precision read by the program",
    """
    def call(x):
        return x * len(torch.get_float32_matmul_precision())
    """,
    writes=["torch.set_float32_matmul_precision('medium')"],
)
case(
    "number of threads read by the program",
    """
    torch.set_num_threads(1)
    def call(x):
        return x * torch.get_num_threads()
    """,
    writes=["torch.set_num_threads(2)"],
)
case(
    "back end's flag read by the program",
    """
    def call(x):
        return x * 2 if torch.backends.cudnn.benchmark else x
    """,
    writes=["torch.backends.cudnn.benchmark = True"],
)
case(
    "user's torch-function mode around the call",
    """
    from torch.overrides import TorchFunctionMode
    class Negated(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return -out if func is torch.Tensor.mul else out
    def call(x):
        return x * 2
    """,
    writes=["modes.enter_context(Negated())", "modes.close()"],
)
case(
    "random numbers",
    """
    def call(x):
        return x + torch.rand(4)
    """,
    state="torch.get_rng_state().sum()",
    changes=False,
)
case(
    "random numbers from a generator",
    """
    GENERATOR = torch.Generator().manual_seed(3)
    def call(x):
        return x + torch.rand(4, generator=GENERATOR)
    """,
    writes=["GENERATOR.manual_seed(3)"],
)

# --- the process --------------------------------------------------------------------------------

case(
    "os.environ by key",
    """
    import os
    os.environ["CHANNEL_SCALE"] = "2"
    def call(x):
        return x * float(os.environ["CHANNEL_SCALE"])
    """,
    writes=["os.environ['CHANNEL_SCALE'] = '3'"],
    unrelated=["os.environ['CHANNEL_OTHER'] = '1'"],
)
case(
    "environment variable deleted",
    """
    import os
    os.environ["CHANNEL_SCALE"] = "2"
    def call(x):
        return x * float(os.environ["CHANNEL_SCALE"])
    """,
    writes=["del os.environ['CHANNEL_SCALE']"],
)
case(
    "os.getenv and os.environ.get with a default",
    """
    import os
    def call(x):
        return x * float(os.getenv("CHANNEL_SCALE", "2")) + len(os.environ.get("CHANNEL_NAME", ""))
    """,
    writes=[
        "os.environ['CHANNEL_SCALE'] = '3'",
        "os.environ['CHANNEL_NAME'] = 'abc'",
        "os.environ.pop('CHANNEL_SCALE')",
    ],
    unrelated=["os.environ['CHANNEL_OTHER'] = '1'"],
)
case(
    "in os.environ",
    """
    import os
    def call(x):
        return x * 2 if "CHANNEL_DEBUG" in os.environ else x
    """,
    writes=["os.environ['CHANNEL_DEBUG'] = ''", "del os.environ['CHANNEL_DEBUG']"],
)
case(
    "context variable",
    """
    import contextvars
    SCALE = contextvars.ContextVar("scale", default=2.0)
    def call(x):
        return x * SCALE.get()
    """,
    writes=["token = SCALE.set(3.0)", "SCALE.reset(token)"],
)
case(
    "thread local",
    """
    import threading
    LOCAL = threading.local()
    LOCAL.scale = 2.0
    def call(x):
        return x * LOCAL.scale
    """,
    writes=["LOCAL.scale = 3.0"],
)
case(
    "written by another thread",
    """
    import threading
    class Bag: pass
    bag = Bag()
    bag.scale = 2.0
    def call(x):
        return x * bag.scale
    def write():
        bag.scale = 3.0
    """,
    writes=["thread = threading.Thread(target=write); thread.start(); thread.join()"],
)
case(
    "file read by the program",
    """
    import tempfile, pathlib
    folder = tempfile.TemporaryDirectory()
    modes.callback(folder.cleanup)
    path = pathlib.Path(folder.name, "scale.txt")
    path.write_text("2.0")
    def call(x):
        with open(path) as file:
            return x * float(file.read())
    """,
    writes=["path.write_text('3.0')"],
)
case(
    "Python's own random numbers",
    """
    import random
    DICE = random.Random(3)
    def call(x):
        return x * DICE.random()
    """,
    writes=["DICE.seed(3)"],
)
