"""Which public methods of the client the checks have called. One that none of them calls is a failure."""

import functools
import importlib
import inspect
import sys

# Where the client keeps what its users call; other modules are its inner works.
BROKER = (
    "queen.client",
    "queen.admin.admin",
    "queen.builders.consume_builder",
    "queen.builders.dlq_builder",
    "queen.builders.operation_builder",
    "queen.builders.push_builder",
    "queen.builders.queue_builder",
    "queen.builders.transaction_builder",
    "queen.ephemeral.ephemeral",
    "queen.kv.kv",
    "queen.timers.timers",
)
STREAMS = ("queen.streams.stream", "queen.streams.helpers.rate_limiter")


class Calls:
    """Every public method of every public class, and every public function, of some modules."""

    def __init__(self, modules):
        self.known = set()
        self.seen = set()
        self.made = {}
        for module in map(importlib.import_module, modules):
            for name, member in list(vars(module).items()):
                if name.startswith("_") or getattr(member, "__module__", None) != module.__name__:
                    continue
                if inspect.isclass(member) and not issubclass(member, (BaseException, tuple)):
                    self.watch_class(member)
                elif inspect.isfunction(member):
                    self.watch_function(name, member)

    def watch_class(self, of):
        for name, member in list(vars(of).items()):
            if name.startswith("_"):
                continue
            label = f"{of.__name__}.{name}"
            if inspect.isfunction(member):
                setattr(of, name, self.watched(label, member))
            elif isinstance(member, (staticmethod, classmethod)):
                setattr(of, name, type(member)(self.watched(label, member.__func__)))
            elif isinstance(member, property):
                setattr(of, name, property(self.watched(label, member.fget), member.fset, member.fdel, member.__doc__))

    def watch_function(self, name, function):
        called = self.watched(name, function)
        for module in [module for path, module in sys.modules.items() if path.split(".")[0] == "queen"]:
            if getattr(module, name, None) is function:
                setattr(module, name, called)

    def watched(self, label, function):
        # A second name of the same function is no second function.
        if function in self.made:
            return self.made[function]
        self.known.add(label)

        @functools.wraps(function)
        def called(*arguments, **options):
            self.seen.add(label)
            return function(*arguments, **options)

        self.made[function] = called
        return called

    def missed(self):
        return sorted(self.known - self.seen)
