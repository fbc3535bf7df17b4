"""Reads a compiled program, an `HloModuleProto`: its instructions, their shapes, and the source lines that they name.

The messages are defined in xla/service/hlo.proto and xla/xla_data.proto of https://github.com/openxla/xla; `wire` reads
them. They are not a public interface: the number of a field may change, and a missing field reads as 0. The classes
below have the numbers of the fields that are read. `dump` reads the buffer assignment beside the program, and checks
both against each other; `collectives` reads what devices send.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sysconfig

from jaxckpt import _compat
from jaxckpt.memory.wire import Message


class ModuleFields:
    """Fields of HloModuleProto."""

    computations, entry_id, schedule, frames = 3, 6, 7, 17


class ComputationFields:
    """Fields of HloComputationProto."""

    instructions, id, root_id = 2, 5, 6


class InstructionFields:
    """Fields of HloInstructionProto."""

    name, opcode, shape, metadata, literal, tuple_index, channel, id = 1, 2, 3, 7, 8, 13, 26, 35
    operand_ids, called_ids, backend_config, groups, attributes, group_list, group_iota = 36, 38, 43, 49, 68, 87, 92
    group_mesh, call = 93, 28


class MetadataFields:
    """Fields of OpMetadata."""

    operation, file, line, frame = 2, 3, 4, 15


class ShapeFields:
    """Fields of ShapeProto."""

    type, dimensions, parts = 2, 3, 4


class LiteralFields:
    """Fields of LiteralProto."""

    s32, s64, u32, u64 = 4, 5, 6, 7


class GroupsFields:
    """Fields of ReplicaGroup, of CollectiveDeviceListProto, and of IotaReplicaGroupListProto."""

    members = 1
    list, iota = 1, 2
    iota_size = 2


class GroupMeshFields:
    """Fields of MeshAxesReplicaGroupListProto, of MeshProto, and of its axes and references to them."""

    mesh, joined = 1, 2
    axes, axis_size = 1, 2
    axis, part = 1, 2
    part_size = 2


class AttributesFields:
    """Fields of FrontendAttributes, and of an entry of its map."""

    entries = 1
    key, value = 1, 2


class _Frames:  # StackFrameIndexProto, its FileLocation and StackFrame
    files, locations, frames = 1, 3, 4
    location_file, location_line = 1, 3
    frame_location, frame_parent = 1, 2


class CompiledProgram:
    """The instructions of a program.

    Attributes:
      entry: id of the computation that runs.
      computations: id of a computation -> its instructions by their ids.
      roots: id of a computation -> id of the instruction that is its result.
      left_out: the ids of what jaxckpt added to stop the compiler: see `jaxckpt.memory.assign`.
    """

    def __init__(self, module: Message) -> None:
        self.entry = module.number(ModuleFields.entry_id)
        self.computations: dict[int, dict[int, Message]] = {}
        self.roots: dict[int, int] = {}
        for computation in module.messages(ModuleFields.computations):
            identity = computation.number(ComputationFields.id)
            self.roots[identity] = computation.number(ComputationFields.root_id)
            self.computations[identity] = {
                instruction.number(InstructionFields.id): instruction
                for instruction in computation.messages(ComputationFields.instructions)
            }
        self.left_out = {
            identity
            for identity, instruction in self.computations[self.entry].items()
            if instruction.text(InstructionFields.call) == _compat.UNKNOWN_CALL
        }
        for identity in self.left_out:
            del self.computations[self.entry][identity]
        index = module.message(ModuleFields.frames)
        self._files = index.texts(_Frames.files)
        self._locations = index.messages(_Frames.locations)
        self._frames = index.messages(_Frames.frames)

    def root(self, computation: int) -> Message:
        """Returns the instruction that is a computation's result; an empty message if there is none."""
        return self.computations.get(computation, {}).get(self.roots.get(computation, 0), Message())

    def line(self, metadata: Message) -> str:
        """Returns the source line, "file.py:12", that an instruction's metadata name; "" if they name none.

        It is that of the innermost frame of the user's code, or of the innermost of all frames if there is none.
        """
        if metadata.text(MetadataFields.file):  # without a table of frames, the names are in the metadata
            return f"{metadata.text(MetadataFields.file)}:{metadata.number(MetadataFields.line)}"
        stack: list[tuple[str, int]] = []
        frame = metadata.number(MetadataFields.frame)  # ids begin at 1; 0 means none
        while 0 < frame <= len(self._frames):
            location = self._locations[self._frames[frame - 1].number(_Frames.frame_location) - 1]
            stack.append(
                (self._files[location.number(_Frames.location_file) - 1], location.number(_Frames.location_line))
            )
            outer = self._frames[frame - 1].number(_Frames.frame_parent)
            frame = outer if outer < frame else 0
        own = [place for place in stack if not _is_library(place[0])] or stack
        return f"{own[0][0]}:{own[0][1]}" if own else ""


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


@functools.cache
def _is_library(file: str) -> bool:
    if file.startswith(_PACKAGE):
        return _compat.is_own_file(file)
    return file.startswith(_STDLIB) or re.search(r"[/\\](site|dist)-packages[/\\]", file) is not None


_TYPES = re.findall(
    r"\w+",
    """invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4
    f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu""",
)
"""Names of xla.PrimitiveType."""
_BITS = (0, 8, 8, 16, 32, 64, 8, 16, 32, 64, 16, 32, 64, 0, 0, 64, 16, 0, 128, 8, 8, 4, 4)
"""Bits of an element, by xla.PrimitiveType; those after these take 8."""
_TUPLE = _TYPES.index("tuple")


def is_empty(shape: Message) -> bool:
    """Returns whether a shape is of a tuple without parts."""
    return shape.number(ShapeFields.type) == _TUPLE and not shape.messages(ShapeFields.parts)


def shape_text(shape: Message) -> str:
    """Returns a shape as XLA writes it: "f32[512,256]"."""
    parts = shape.messages(ShapeFields.parts)
    if parts:
        return f"({', '.join(map(shape_text, parts))})"
    number = shape.number(ShapeFields.type)
    name = _TYPES[number] if number < len(_TYPES) else f"type{number}"
    return f"{name}[{','.join(map(str, shape.numbers(ShapeFields.dimensions)))}]"


def shape_bytes(shape: Message) -> int:
    """Returns the bytes of an array, or of all arrays of a tuple, without padding."""
    parts = shape.messages(ShapeFields.parts)
    if parts:
        return sum(map(shape_bytes, parts))
    kind = shape.number(ShapeFields.type)
    bits = _BITS[kind] if kind < len(_BITS) else 8
    return math.prod(shape.numbers(ShapeFields.dimensions)) * bits // 8
