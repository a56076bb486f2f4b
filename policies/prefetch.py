"""A hint to the processor: this record of an array is needed soon. For loops that know their future."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Begins to load array[index] into the caches; any index is safe, nothing is read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        records = context.make_array(signature.args[0])(context, builder, arguments[0])
        byte = ir.IntType(8).as_pointer()
        address = builder.ptrtoint(records.data, ir.IntType(64))
        wanted = builder.inttoptr(builder.add(address, builder.mul(arguments[1], records.itemsize)), byte)
        number = ir.IntType(32)
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        builder.call(hint, [wanted, number(0), number(3), number(1)])  # to read, into all levels, data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
