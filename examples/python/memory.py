"""Lesson 2: registers memory, and shows the keys of the regions, as ../c/memory.c does."""

from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError

from lesson import verbs

LOCAL_WRITE = verbs.IBV_ACCESS_LOCAL_WRITE


def register(pd, length, access):
    try:
        region = MR(pd, length, access)
    except PyverbsRDMAError as error:
        print(f'  refused: {error}')
        return
    print(f'  {length} bytes, lkey {region.lkey:#010x}, rkey {region.rkey:#010x}')
    region.close()


devices = get_device_list()
if not devices:
    raise SystemExit('there are no RDMA devices')
with Context(name=devices[0].name.decode()) as context, PD(context) as pd:
    print('for this program only:')
    register(pd, 8192, LOCAL_WRITE)
    print('for this program, and for peers to read:')
    register(pd, 4096, LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_READ)
    print("writable for peers, but not for this program's own requests:")
    register(pd, 4096, verbs.IBV_ACCESS_REMOTE_WRITE)
