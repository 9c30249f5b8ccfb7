"""Host code of the template families: the launches of a call, as pure functions of shapes, strides and numbers."""
