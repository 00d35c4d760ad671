import os
import time

BEGAN = (time.time(), time.monotonic(), os.getpid())  # when this process imported hpcinit
