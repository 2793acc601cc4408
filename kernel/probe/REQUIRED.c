// SPDX-License-Identifier: MIT OR Apache-2.0
/* What every kernel must have: without it, the build stops with a message. */
#include <linux/moduleparam.h>
#include <net/sock.h>
#include <rdma/ib_verbs.h>
#include <rdma/iw_cm.h>
#include <uapi/rdma/siw-abi.h>

/* Linux 5.17 and later, and kernels with the newer interfaces of networking and RDMA. */
static inline void probe(struct sock *sk, struct ib_device *device, struct ib_device_ops *ops,
			 struct net_device *netdev, netdevice_tracker *tracker)
{
	struct rdma_stat_desc counter = { .name = "counter" };

	get_net_track(sock_net(sk), &sk->ns_tracker, GFP_KERNEL);
	sock_inuse_add(sock_net(sk), 1);
	netdev_hold(netdev, tracker, GFP_KERNEL);
	device->iw_driver_flags = IW_F_NO_PORT_MAP;
	rdma_alloc_hw_stats_struct(&counter, 1, 0);
	ops->disassociate_ucontext = NULL;
	param_set_uint_minmax(NULL, NULL, 1, 2);
}
