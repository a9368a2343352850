"""Out of scope here: TPUs.

The names can be imported and compared with; using one raises NotImplementedError.
"""

from ..out_of_scope import out_of_scope

install_xla = out_of_scope("install_xla")
