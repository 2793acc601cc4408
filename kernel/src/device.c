// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The RDMA device as ib_core and programs see it: attributes, protection domains and user contexts.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/idr.h>
#include <linux/if_arp.h>
#include <linux/module.h>
#include <net/addrconf.h>
#include <rdma/ib_addr.h>
#include <rdma/iw_cm.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

/* siw's identifiers, which programs may check. */
#define VENDOR_ID 0x626d74
#define VENDOR_PART_ID 1

/* Limits of the engine, or sensible limits for one machine. */
#define MAX_QP 65536
#define MAX_CQ 65536
#define MAX_MR (1 << 20)
#define MAX_PD 65536
#define MAX_SRQ 65536

static DEFINE_IDA(pd_numbers);

static int query_device(struct ib_device *base, struct ib_device_attr *attributes,
			struct ib_udata *udata)
{
	struct rnic_device *device = to_device(base);

	/* Newer kernels pass NULL for their own calls. */
	if (udata && (udata->inlen || udata->outlen))
		return -EINVAL;
	memset(attributes, 0, sizeof(*attributes));
	attributes->device_cap_flags = IB_DEVICE_MEM_MGT_EXTENSIONS;
	attributes->kernel_cap_flags = IBK_ALLOW_USER_UNREG;
	attributes->max_fast_reg_page_list_len = RNIC_MAX_FAST_PAGES;
	attributes->max_qp = MAX_QP;
	attributes->max_qp_wr = RNIC_MAX_WR;
	attributes->max_cq = MAX_CQ;
	attributes->max_cqe = RNIC_MAX_CQE;
	attributes->max_mr = MAX_MR;
	attributes->max_mr_size = ~0ull;
	attributes->max_pd = MAX_PD;
	attributes->max_srq = MAX_SRQ;
	attributes->max_srq_wr = RNIC_MAX_WR;
	attributes->max_srq_sge = SIW_MAX_SGE;
	attributes->max_send_sge = SIW_MAX_SGE;
	attributes->max_recv_sge = SIW_MAX_SGE;
	attributes->max_sge_rd = 1;
	attributes->max_qp_rd_atom = RNIC_MAX_READS;
	attributes->max_qp_init_rd_atom = RNIC_MAX_READS;
	attributes->max_res_rd_atom = MAX_QP * RNIC_MAX_READS;
	attributes->page_size_cap = PAGE_SIZE;
	attributes->vendor_id = VENDOR_ID;
	attributes->vendor_part_id = VENDOR_PART_ID;
	addrconf_addr_eui48((u8 *)&attributes->sys_image_guid, device->address);
	return 0;
}

static int query_port(struct ib_device *base, u32 port, struct ib_port_attr *attributes)
{
	struct rnic_device *device = to_device(base);
	int result = ib_get_eth_speed(base, port, &attributes->active_speed,
				      &attributes->active_width);

	if (result)
		return result;
	attributes->gid_tbl_len = 1;
	attributes->max_msg_sz = 1u << 31;
	attributes->max_mtu = ib_mtu_int_to_enum(device->netdev->mtu);
	attributes->active_mtu = attributes->max_mtu;
	attributes->port_cap_flags = IB_PORT_CM_SUP | IB_PORT_DEVICE_MGMT_SUP;
	if (rnic_link_is_up(device->netdev)) {
		attributes->state = IB_PORT_ACTIVE;
		attributes->phys_state = IB_PORT_PHYS_STATE_LINK_UP;
	} else {
		attributes->state = IB_PORT_DOWN;
		attributes->phys_state = IB_PORT_PHYS_STATE_DISABLED;
	}
	return 0;
}

static int port_immutable(struct ib_device *base, u32 port, struct ib_port_immutable *immutable)
{
	immutable->gid_tbl_len = 1;
	immutable->core_cap_flags = RDMA_CORE_PORT_IWARP;
	return 0;
}

static int query_gid(struct ib_device *base, u32 port, int index, union ib_gid *gid)
{
	memset(gid, 0, sizeof(*gid));
	memcpy(gid->raw, to_device(base)->address, ETH_ALEN);
	return 0;
}

/* In the order of rk_qp_counters(). */
static const struct rdma_stat_desc counters[RK_COUNTERS] = {
	{ .name = "tx_bytes" },
	{ .name = "rx_bytes" },
	{ .name = "tx_fpdus" },
	{ .name = "rx_fpdus" },
	{ .name = "tx_messages" },
	{ .name = "rx_messages" },
	{ .name = "tx_payload" },
	{ .name = "rx_payload" },
	{ .name = "rx_direct" },
	{ .name = "rx_requests" },
	{ .name = "crc_errors" },
	{ .name = "marker_errors" },
	{ .name = "receiver_not_ready" },
	{ .name = "terminates_sent" },
	{ .name = "terminates_received" },
	{ .name = "completions" },
};

static struct rdma_hw_stats *alloc_port_stats(struct ib_device *base, u32 port)
{
	return rdma_alloc_hw_stats_struct(counters, RK_COUNTERS, RDMA_HW_STATS_DEFAULT_LIFESPAN);
}

static int get_stats(struct ib_device *base, struct rdma_hw_stats *stats, u32 port, int index)
{
	struct rnic_device *device = to_device(base);
	unsigned long number;
	struct rnic_qp *qp;

	xa_lock_bh(&device->qps);
	memcpy(stats->value, device->retired_counters, sizeof(device->retired_counters));
	xa_for_each(&device->qps, number, qp) {
		spin_lock(&qp->lock);
		rk_qp_counters(qp->engine, stats->value);
		spin_unlock(&qp->lock);
	}
	xa_unlock_bh(&device->qps);
	return RK_COUNTERS;
}

static int alloc_pd(struct ib_pd *pd, struct ib_udata *udata)
{
	int number = ida_alloc_range(&pd_numbers, 1, MAX_PD, GFP_KERNEL);

	if (number < 0)
		return number == -ENOSPC ? -ENOMEM : number;
	to_pd(pd)->number = number;
	return 0;
}

static int dealloc_pd(struct ib_pd *pd, struct ib_udata *udata)
{
	ida_free(&pd_numbers, to_pd(pd)->number);
	return 0;
}

static int alloc_ucontext(struct ib_ucontext *context, struct ib_udata *udata)
{
	struct siw_uresp_alloc_ctx response = {
		.dev_id = to_device(context->device)->netdev->ifindex,
	};

	if (udata->outlen < sizeof(response))
		return -EINVAL;
	return ib_copy_to_udata(udata, &response, sizeof(response));
}

static void dealloc_ucontext(struct ib_ucontext *context)
{
}

/*
 * Programs may have the device open when it is removed: ib_core destroys their objects before.
 * Their mappings stay valid until they unmap them, because a mapping holds its pages.
 */
static void disassociate_ucontext(struct ib_ucontext *context)
{
}

#ifdef HAVE_CREATE_CQ_BUNDLE
static int create_cq(struct ib_cq *cq, const struct ib_cq_init_attr *attributes,
		     struct uverbs_attr_bundle *call)
{
	return rnic_create_cq(cq, attributes, call ? &call->driver_udata : NULL);
}
#else
static int create_cq(struct ib_cq *cq, const struct ib_cq_init_attr *attributes,
		     struct ib_udata *udata)
{
	return rnic_create_cq(cq, attributes, udata);
}
#endif

#ifdef HAVE_REG_USER_MR_DMAH
static struct ib_mr *reg_user_mr(struct ib_pd *pd, u64 start, u64 len, u64 iova, int rights,
				 struct ib_dmah *dmah, struct ib_udata *udata)
{
	/* A hint for devices that access memory by DMA. */
	return dmah ? ERR_PTR(-EOPNOTSUPP) : rnic_reg_user_mr(pd, start, len, iova, rights, udata);
}
#else
static struct ib_mr *reg_user_mr(struct ib_pd *pd, u64 start, u64 len, u64 iova, int rights,
				 struct ib_udata *udata)
{
	return rnic_reg_user_mr(pd, start, len, iova, rights, udata);
}
#endif

/* Called after the device has lost its last user. */
static void dealloc_driver(struct ib_device *base)
{
	struct rnic_device *device = to_device(base);

	rnic_net_remove(device);
	xa_destroy(&device->qps);
	rnic_areas_free(device);
	rk_device_free(device->engine);
	netdev_put(device->netdev, &device->tracker);
}

/*
 * Retries the queue pairs that wait until memory is no longer in use. This is rare, so the driver
 * does not keep a list of them, but queues the work item of every queue pair.
 */
void rnic_memory_unused(struct rnic_device *device)
{
	unsigned long number;
	struct rnic_qp *qp;

	xa_lock_bh(&device->qps);
	xa_for_each(&device->qps, number, qp)
		rnic_stream_kick(qp);
	xa_unlock_bh(&device->qps);
}

static const struct ib_device_ops device_ops = {
	.owner = THIS_MODULE,
	.uverbs_abi_ver = SIW_ABI_VERSION,
	.driver_id = RDMA_DRIVER_SIW,

	.query_device = query_device,
	.query_port = query_port,
	.get_port_immutable = port_immutable,
	.query_gid = query_gid,
	.alloc_hw_port_stats = alloc_port_stats,
	.get_hw_stats = get_stats,
	.alloc_pd = alloc_pd,
	.dealloc_pd = dealloc_pd,
	.alloc_ucontext = alloc_ucontext,
	.dealloc_ucontext = dealloc_ucontext,
	.disassociate_ucontext = disassociate_ucontext,
	.mmap = rnic_mmap,
	.mmap_free = rnic_mmap_free,
	.create_cq = create_cq,
	.destroy_cq = rnic_destroy_cq,
	.poll_cq = rnic_poll_cq,
	.req_notify_cq = rnic_req_notify_cq,
	.create_srq = rnic_create_srq,
	.modify_srq = rnic_modify_srq,
	.query_srq = rnic_query_srq,
	.destroy_srq = rnic_destroy_srq,
	.post_srq_recv = rnic_post_srq_recv,
	.create_qp = rnic_create_qp,
	.modify_qp = rnic_modify_qp,
	.query_qp = rnic_query_qp,
	.destroy_qp = rnic_destroy_qp,
	.post_send = rnic_post_send,
	.post_recv = rnic_post_recv,
	.reg_user_mr = reg_user_mr,
	.dereg_mr = rnic_dereg_mr,
	.get_dma_mr = rnic_get_dma_mr,
	.alloc_mr = rnic_alloc_mr,
	.map_mr_sg = rnic_map_mr_sg,
	.iw_add_ref = rnic_iw_add_ref,
	.iw_rem_ref = rnic_qp_put,
	.iw_get_qp = rnic_iw_get_qp,
	.iw_connect = rnic_connect,
	.iw_accept = rnic_accept,
	.iw_reject = rnic_reject,
	.iw_create_listen = rnic_create_listen,
	.iw_destroy_listen = rnic_destroy_listen,
	.dealloc_driver = dealloc_driver,

	INIT_RDMA_OBJ_SIZE(ib_cq, rnic_cq, base),
	INIT_RDMA_OBJ_SIZE(ib_qp, rnic_qp, base),
	INIT_RDMA_OBJ_SIZE(ib_srq, rnic_srq, base),
	INIT_RDMA_OBJ_SIZE(ib_pd, rnic_pd, base),
	INIT_RDMA_OBJ_SIZE(ib_ucontext, rnic_ucontext, base),
};

/*
 * The hardware address becomes the GID. The loopback device has an address of zeros, which the
 * kernel's GID table would skip; it gets a random address instead.
 */
static void choose_address(struct rnic_device *device)
{
	const struct net_device *netdev = device->netdev;

	memset(device->address, 0, sizeof(device->address));
	memcpy(device->address, netdev->dev_addr, min_t(size_t, netdev->addr_len, ETH_ALEN));
	if (is_zero_ether_addr(device->address))
		eth_random_addr(device->address);
}

/* Creates a device and registers it. Holds the netdev until dealloc_driver. */
int rnic_device_add(const char *name, struct net_device *netdev)
{
	struct rnic_device *device = ib_alloc_device(rnic_device, base);
	struct ib_device *base;
	int result = -ENOMEM;

	if (!device)
		return -ENOMEM;
	base = &device->base;
	device->engine = rk_device_new();
	if (!device->engine)
		goto no_engine;
	rwlock_init(&device->table_lock);
	spin_lock_init(&device->area_lock);
	INIT_LIST_HEAD(&device->partials);
	mutex_init(&device->register_lock);
	xa_init_flags(&device->qps, XA_FLAGS_ALLOC | XA_FLAGS_LOCK_BH);
	device->netdev = netdev;
	device->net = dev_net(netdev);
	device->active = rnic_link_is_up(netdev);
	choose_address(device);

	addrconf_addr_eui48((u8 *)&base->node_guid, device->address);
	/* Without this bit, ib_uverbs does not pass a program's post_send (its doorbell) on. */
	base->uverbs_cmd_mask |= BIT_ULL(IB_USER_VERBS_CMD_POST_SEND);
	base->node_type = RDMA_NODE_RNIC;
	base->phys_port_cnt = 1;
	base->num_comp_vectors = num_possible_cpus();
	strscpy(base->node_desc, SIW_NODE_DESC_COMMON, sizeof(base->node_desc));
	strscpy(base->iw_ifname, netdev->name, sizeof(base->iw_ifname));
	base->iw_driver_flags = IW_F_NO_PORT_MAP;
	ib_set_device_ops(base, &device_ops);
	result = ib_device_set_netdev(base, netdev, RNIC_PORT);
	if (result)
		goto no_device;
	netdev_hold(netdev, &device->tracker, GFP_KERNEL);
	/* Before the registration: after it, the device may be removed at any time. */
	rnic_net_add(device);
	result = ib_register_device(base, name, NULL);
	if (!result)
		return 0;
	rnic_net_remove(device);
	netdev_put(netdev, &device->tracker);
no_device:
	rk_device_free(device->engine);
no_engine:
	ib_dealloc_device(base);
	return result;
}
