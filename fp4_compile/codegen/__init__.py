"""What the fp4 operators become on a device: programs Inductor compiles and fuses with their neighbours."""

from __future__ import annotations
