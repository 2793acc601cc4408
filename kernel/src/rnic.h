/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The objects of the RDMA device, and what its files offer each other. */
#ifndef IWARP_RNIC_H
#define IWARP_RNIC_H

#include <linux/etherdevice.h>
#include <linux/netdevice.h>
#include <linux/spinlock.h>
#include <rdma/ib_verbs.h>
#include <uapi/rdma/siw-abi.h>

#include "runtime.h"

/* Devices of this module have one port. */
#define RNIC_PORT 1
#define RNIC_MAX_CQE (1 << 20)

/* A device. It belongs to one network device for all of its life. */
struct rnic_device {
	struct ib_device base;
	struct net_device *netdev;
	netdevice_tracker tracker;
	/* The memory table. */
	struct rk_device *engine;
	/* The GID of the port: a hardware address, and zeros behind it. */
	u8 address[ETH_ALEN];
	/* What was last told about the port. Changed by the notifier only, which holds the RTNL. */
	bool active;
};

struct rnic_pd {
	struct ib_pd base;
	/* The protection domain as the engine knows it. */
	u32 number;
};

struct rnic_ucontext {
	struct ib_ucontext base;
};

/* A completion queue. See cq.c. */
struct rnic_cq {
	struct ib_cq base;
	/* Guards what follows, and the order of the entries. */
	spinlock_t lock;
	struct siw_cqe *ring;
	struct siw_cq_ctrl *control;
	u32 next;
	/* Something was written since the last look, and something for which a program that waits for solicited events is told. */
	bool written;
	bool solicited;
	bool overflowed;
	struct rdma_user_mmap_entry *mapping;
};

/* A queue pair. Programs cannot make one yet. */
struct rnic_qp {
	struct ib_qp base;
};

static inline struct rnic_cq *to_cq(struct ib_cq *cq)
{
	return container_of(cq, struct rnic_cq, base);
}

static inline struct rnic_device *to_device(struct ib_device *device)
{
	return container_of(device, struct rnic_device, base);
}

static inline struct rnic_pd *to_pd(struct ib_pd *pd)
{
	return container_of(pd, struct rnic_pd, base);
}

static inline struct rnic_ucontext *to_ucontext(struct ib_ucontext *context)
{
	return container_of(context, struct rnic_ucontext, base);
}

/* Whether octets can get through the network device of a port. */
static inline bool rnic_can_carry(const struct net_device *netdev)
{
	return netif_running(netdev) && netif_carrier_ok(netdev);
}

/* device.c */
int rnic_device_add(const char *name, struct net_device *netdev);

/* map.c */
struct rdma_user_mmap_entry *rnic_map(struct rnic_ucontext *context, void *at, size_t octets, u64 *key);
int rnic_mmap(struct ib_ucontext *context, struct vm_area_struct *area);
void rnic_mmap_free(struct rdma_user_mmap_entry *entry);

/* cq.c */
int rnic_create_cq(struct ib_cq *base, const struct ib_cq_init_attr *attributes, struct ib_udata *udata);
int rnic_destroy_cq(struct ib_cq *base, struct ib_udata *udata);
int rnic_poll_cq(struct ib_cq *base, int count, struct ib_wc *completions);
int rnic_req_notify_cq(struct ib_cq *base, enum ib_cq_notify_flags flags);
bool rnic_cq_notify(struct rnic_cq *cq);

#endif
