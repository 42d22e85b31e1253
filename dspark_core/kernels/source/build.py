"""Compile kernels into an object file: `python -m dspark_core.kernels.source.build FILE KEY`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from numba import njit, types

from dspark_core.kernels.library import Library, source_key
from dspark_core.kernels.source import attention, choosing, matmul, pointwise, program, sampling

Function = Callable[[Any], None]
SIGNATURE = types.void(types.CPointer(types.int64))
# Numba's functions return a status and take where a result and an exception would go; kernels have neither. And they
# would call a destructor for arrays that own their memory; kernels' arrays do not.
CALLER = """
declare i32 @"{inner}"(ptr, ptr, ptr)
define void @{name}(ptr %numbers) {{
  %result = alloca ptr
  %exception = alloca ptr
  call i32 @"{inner}"(ptr %result, ptr %exception, ptr %numbers)
  ret void
}}
define void @NRT_MemInfo_call_dtor(ptr %nothing) {{
  unreachable
}}
"""


def all_kernels() -> dict[str, Function]:
    parts = (attention, choosing, matmul, pointwise, program, sampling)
    return {name: function for part in parts for name, function in part.KERNELS.items()}


def compiled(kernels: Mapping[str, Function]) -> bytes:
    """An object file of functions `void (int64*)` with these names."""
    whole = llvm.parse_assembly("")
    for name, function in kernels.items():
        dispatcher = njit(SIGNATURE, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
        (result,) = dispatcher.overloads.values()
        module = llvm.parse_assembly(result.library.get_llvm_str())
        module.link_in(llvm.parse_assembly(CALLER.format(name=name, inner=result.fndesc.llvm_func_name)))
        for part in (*module.functions, *module.global_variables):  # several kernels have parts of the same name
            if not part.is_declaration and part.name != name:
                part.linkage = "internal"
        whole.link_in(module)
    data: bytes = _this_cpu().emit_object(whole)
    return data


def _this_cpu() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_default_triple().create_target_machine(cpu, features, opt=3, reloc="pic", jit=True)


def main() -> None:
    path, key = sys.argv[1:]
    if source_key() != key:
        sys.exit("the kernels' source has changed meanwhile")
    kernels = all_kernels()
    data = compiled(kernels)
    library = Library(data)  # a name that is found nowhere ends this process, and not the one that serves
    for name in kernels:
        library.address(name)
    Path(path).write_bytes(data)


if __name__ == "__main__":
    main()
