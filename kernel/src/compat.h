/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Differences between kernels. probes.h says which interfaces this kernel has; see probe/. */
#ifndef IWARP_COMPAT_H
#define IWARP_COMPAT_H

#include <linux/mm.h>
#include <linux/net.h>
#include <linux/timer.h>
#include <linux/uio.h>
#include <net/sock.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>

#include "probes.h"

#ifndef HAVE_REQUIRED
#error "iwarp_rnic needs Linux 6.1, or a kernel with its networking and RDMA interfaces, \
with INFINIBAND, INFINIBAND_ADDR_TRANS and INET. probes.h.log says what is missing."
#endif

/* Kernels before 6.2 do not define this name for a direction of copies. */
#ifndef ITER_SOURCE
#define ITER_SOURCE WRITE
#endif

#ifndef HAVE_TIMER_DELETE
#define timer_delete_sync del_timer_sync
#define timer_shutdown_sync del_timer_sync
#endif

/* The argument of kernel_bind() and kernel_connect(). */
#ifdef HAVE_SOCKADDR_UNSIZED
typedef struct sockaddr_unsized rnic_sockaddr;
#else
typedef struct sockaddr rnic_sockaddr;
#endif

#ifndef HAVE_UMEM_GET_VA
#define ib_umem_get_va ib_umem_get
#endif

#ifndef HAVE_VM_FLAGS_SET
static inline void vm_flags_set(struct vm_area_struct *area, unsigned long flags)
{
	area->vm_flags |= flags;
}
#endif

/* Keeps TCP from using the task's page: data are sent from softirq, too. */
static inline void rnic_forbid_task_frag(struct sock *sk)
{
#ifdef HAVE_USE_TASK_FRAG
	sk->sk_use_task_frag = false;
#endif
}

/*
 * Makes a kernel socket hold its network namespace, as sockets of programs do. The caller holds the
 * namespace and the socket's lock.
 */
static inline void rnic_upgrade_net_ref(struct sock *sk)
{
#ifdef HAVE_NET_REFCNT_UPGRADE
	sk_net_refcnt_upgrade(sk);
#else
	struct net *net = sock_net(sk);

#ifdef HAVE_NETNS_TRACKER
	__netns_tracker_free(net, &sk->ns_tracker, false);
#endif
	sk->sk_net_refcnt = 1;
	get_net_track(net, &sk->ns_tracker, GFP_KERNEL);
	sock_inuse_add(net, 1);
#endif
}

#endif
