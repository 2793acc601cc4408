//! iWARP RDMA in user space over plain TCP.
