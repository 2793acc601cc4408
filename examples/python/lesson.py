"""What the Python programs of the course share: names of pyverbs, and an endpoint of rdma_cm."""

try:  # The modules have these names since rdma-core 53.
    import pyverbs.libibverbs_enums as verbs
    import pyverbs.librdmacm_enums as cm
except ImportError:
    import pyverbs.enums as verbs
    import pyverbs.cm_enums as cm
from pyverbs.cmid import CMID, AddrInfo
from pyverbs.qp import QPCap, QPInitAttr

PORT = '7471'


def endpoint(host):
    """Returns an identifier with a queue pair to connect to `host`, or a listener without it."""
    if host:
        address = AddrInfo(dst=host, dst_service=PORT, port_space=cm.RDMA_PS_TCP)
    else:
        address = AddrInfo(src='0.0.0.0', src_service=PORT, port_space=cm.RDMA_PS_TCP,
                           flags=cm.RAI_PASSIVE)
    queues = QPInitAttr(cap=QPCap(max_send_wr=1, max_recv_wr=1), sq_sig_all=1)
    return CMID(creator=address, qp_init_attr=queues)


def succeeded(wc):
    """Ends the program unless the request has succeeded. Returns its completion."""
    if wc.status != verbs.IBV_WC_SUCCESS:
        raise SystemExit(f'a request failed with status {wc.status}')
    return wc
