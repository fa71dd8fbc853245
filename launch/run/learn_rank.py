"""Where a learner's process begins: it asks to die with its parent before it imports what takes seconds."""

from __future__ import annotations

import sys

from pipeline.child_process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from launch.run.learn import main

    main(sys.argv[1:])
