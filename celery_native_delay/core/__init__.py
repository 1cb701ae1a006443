"""The pure core: arithmetic and plans as data.

No I/O, no clock, nothing imported but the standard library; time is always an
argument. ``make check`` holds this.
"""
