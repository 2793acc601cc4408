/* Tests of calls that run out of memory. For each call, the test makes each allocation fail once,
 * first alone and then together with all later allocations of the call. The call must succeed, or
 * fail with ENOMEM and without effect. The process must not abort, and nothing may leak. The table
 * contains every call of the C libraries that may allocate. Arguments select rows by name. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>

#include "check.h"

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
	*__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SWEEPS = 5 };

/* The number of allocations of this thread before one fails, or -1 if none fails. */
static __thread long allocations_left = -1;
static __thread int fail_all_later, some_failed;
static atomic_long allocated;

static int allocation_fails(void)
{
	if (allocations_left < 0)
		return 0;
	if (allocations_left > 0) {
		allocations_left--;
		return 0;
	}
	if (!fail_all_later)
		allocations_left = -1;
	some_failed = 1;
	errno = ENOMEM;
	return 1;
}

static void *counted(void *p)
{
	if (p)
		allocated++;
	return p;
}

void *malloc(size_t size)
{
	return allocation_fails() ? NULL : counted(__libc_malloc(size));
}

/* The function of the C library that registers destructors of thread-local variables. It aborts if
 * an allocation fails, so its allocations always succeed. */
static char *thread_atexit;

void *calloc(size_t n, size_t size)
{
	size_t offset = (char *)__builtin_return_address(0) - thread_atexit;

	if (offset < 0x200)
		return counted(__libc_calloc(n, size));
	return allocation_fails() ? NULL : counted(__libc_calloc(n, size));
}

void *realloc(void *p, size_t size)
{
	if (allocation_fails())
		return NULL;
	return p ? __libc_realloc(p, size) : counted(__libc_realloc(p, size));
}

void *memalign(size_t align, size_t size)
{
	return allocation_fails() ? NULL : counted(__libc_memalign(align, size));
}

void *aligned_alloc(size_t align, size_t size)
{
	return memalign(align, size);
}

int posix_memalign(void **to, size_t align, size_t size)
{
	*to = memalign(align, size);
	return *to ? 0 : ENOMEM;
}

void free(void *p)
{
	if (p)
		allocated--;
	__libc_free(p);
}

static struct ibv_device **devices;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_srq *tag_srq;
static struct ibv_qp *idle_qp, *ud_qp, *ex_qp;
static struct ibv_comp_channel *comp_channel;
static struct rdma_event_channel *events;
static union ibv_gid gid;
static struct sockaddr_in loopback;
static char memory[8192];

/* Debian's headers do not declare these functions; later headers do. */
struct comp_cntr_attributes {
	uint32_t comp_mask, type, flags;
};
struct comp_cntr_attach {
	uint32_t comp_mask, op_mask;
};
void *create_comp_cntr(struct ibv_context *,
	struct comp_cntr_attributes *) __asm__("ibv_create_comp_cntr");
int destroy_comp_cntr(void *) __asm__("ibv_destroy_comp_cntr");
int attach_comp_cntr(struct ibv_qp *, void *,
	struct comp_cntr_attach *) __asm__("ibv_qp_attach_comp_cntr");
void *alloc_buf(struct ibv_pd *, size_t, void **) __asm__("ibv_alloc_buf");
void free_buf(void *) __asm__("ibv_free_buf");

/* The object that a row's call needs. `set_up` creates it without failing allocations, and
 * `tear_down` destroys it. */
static void *object;

/* Converts a result of 0 or an errno to that of a call that creates an object. */
static void *null_if_error(int code)
{
	if (code > 0)
		errno = code;
	return code ? NULL : memory;
}

static int nothing(void *p)
{
	(void)p;
	return 0;
}

static void *make_context(void) { return ibv_open_device(devices[0]); }
static int drop_context(void *p) { return ibv_close_device(p); }
static void *make_list(void) { return ibv_get_device_list(NULL); }

static int drop_list(void *p)
{
	ibv_free_device_list(p);
	return 0;
}

static void *make_pd(void) { return ibv_alloc_pd(context); }
static int drop_pd(void *p) { return ibv_dealloc_pd(p); }
static void *make_imported_pd(void) { return ibv_import_pd(context, pd->handle); }

static int drop_imported_pd(void *p)
{
	ibv_unimport_pd(p);
	return 0;
}

static void *make_td(void) { return ibv_alloc_td(context, &(struct ibv_td_init_attr){ 0 }); }
static int drop_td(void *p) { return ibv_dealloc_td(p); }
static void *make_parent(void) { return ibv_alloc_parent_domain(context,
	&(struct ibv_parent_domain_init_attr){ .pd = pd }); }
static void *make_channel(void) { return ibv_create_comp_channel(context); }
static int drop_channel(void *p) { return ibv_destroy_comp_channel(p); }
static void *make_cq(void) { return ibv_create_cq(context, 10000, NULL, comp_channel, 0); }
static int drop_cq(void *p) { return ibv_destroy_cq(p); }

static void *make_cq_ex(void)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 3000, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP };

	return ibv_create_cq_ex(context, &attr);
}

static void set_up_cq(void) { NEED((object = ibv_create_cq(context, 16, NULL, NULL, 0))); }
static void *resize_cq(void) { return null_if_error(ibv_resize_cq(object, 20000)); }
static void tear_down_cq(void) { CODE(0, ibv_destroy_cq(object)); }

static void *make_mr(void) { return ibv_reg_mr(pd, memory, sizeof(memory),
	IBV_ACCESS_LOCAL_WRITE); }
static void *make_on_demand(void) { return ibv_reg_mr(pd, memory, sizeof(memory),
	IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND); }
static void *make_null_mr(void) { return ibv_alloc_null_mr(pd); }
static int drop_mr(void *p) { return ibv_dereg_mr(p); }
static void *make_imported_mr(void) { return ibv_import_mr(pd, mr->handle); }

static int drop_imported_mr(void *p)
{
	ibv_unimport_mr(p);
	return 0;
}

static void set_up_mr(void) { NEED((object = ibv_reg_mr(pd, memory, 4096,
	IBV_ACCESS_LOCAL_WRITE))); }

static void *rereg_mr(void)
{
	/* The call returns a negative number and sets errno. */
	int flags = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS;

	return ibv_rereg_mr(object, flags, NULL, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE)
		? NULL : memory;
}

static void tear_down_mr(void) { CODE(0, ibv_dereg_mr(object)); }
static void *make_mw(void) { return ibv_alloc_mw(pd, IBV_MW_TYPE_2); }
static int drop_mw(void *p) { return ibv_dealloc_mw(p); }
static void *make_dm(void) { return ibv_alloc_dm(context,
	&(struct ibv_alloc_dm_attr){ .length = 100000 }); }
static int drop_dm(void *p) { return ibv_free_dm(p); }
static void set_up_dm(void) { NEED((object = make_dm())); }
static void *make_dm_mr(void) { return ibv_reg_dm_mr(pd, object, 0, 64, IBV_ACCESS_ZERO_BASED); }
static void tear_down_dm(void) { CODE(0, ibv_free_dm(object)); }

static void *make_buf(void)
{
	void *buf;

	return alloc_buf(pd, 100000, &buf) ? buf : NULL;
}

static int drop_buf(void *p)
{
	free_buf(p);
	return 0;
}

static void *make_ah(void)
{
	struct ibv_ah_attr attr = { .port_num = 1, .is_global = 1,
		.grh = { .dgid = gid, .hop_limit = 1 } };

	return ibv_create_ah(pd, &attr);
}

static int drop_ah(void *p) { return ibv_destroy_ah(p); }
static void *make_comp_cntr(void) { return create_comp_cntr(context,
	&(struct comp_cntr_attributes){ 0 }); }
static int drop_comp_cntr(void *p) { return destroy_comp_cntr(p); }
static void *make_xrcd(void) { return ibv_open_xrcd(context,
	&(struct ibv_xrcd_init_attr){ .comp_mask = 3, .fd = -1, .oflags = O_CREAT }); }
static int drop_xrcd(void *p) { return ibv_close_xrcd(p); }

static void *make_srq(void)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 4000, .max_sge = 4 } };

	return ibv_create_srq(pd, &attr);
}

static int drop_srq(void *p) { return ibv_destroy_srq(p); }

static void *make_tag_srq(void)
{
	struct ibv_srq_init_attr_ex attr = { .attr = { .max_wr = 100, .max_sge = 1 },
		.srq_type = IBV_SRQT_TM, .pd = pd, .cq = cq,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ |
			IBV_SRQ_INIT_ATTR_TM,
		.tm_cap = { .max_num_tags = 100, .max_ops = 10 } };

	return ibv_create_srq_ex(context, &attr);
}

static void set_up_srq(void) { NEED((object = make_srq())); }
static void *modify_srq(void) { return null_if_error(ibv_modify_srq(object,
	&(struct ibv_srq_attr){ .max_wr = 8000 }, IBV_SRQ_MAX_WR)); }
static void tear_down_srq(void) { CODE(0, ibv_destroy_srq(object)); }

static void *make_qp_of(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = type,
		.cap = { 1000, 1000, 4, 4, 64 } };

	return ibv_create_qp(pd, &attr);
}

static void *make_qp(void) { return make_qp_of(IBV_QPT_RC); }
static void *make_uc_qp(void) { return make_qp_of(IBV_QPT_UC); }
static void *make_ud_qp(void) { return make_qp_of(IBV_QPT_UD); }

static void *make_qp_ex(void)
{
	struct ibv_qp_init_attr_ex attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { 100, 100, 4, 4, 64 }, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
			.send_ops_flags = IBV_QP_EX_WITH_SEND };

	return ibv_create_qp_ex(context, &attr);
}

static void *make_tag_qp(void)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .srq = tag_srq,
		.qp_type = IBV_QPT_RC, .cap = { 100, 0, 4, 0, 64 } };

	return ibv_create_qp(pd, &attr);
}

static int drop_qp(void *p) { return ibv_destroy_qp(p); }
static void set_up_xrcd(void) { NEED((object = make_xrcd())); }

static void *make_xrc_target(void)
{
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_XRC_RECV,
		.comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = object };

	return ibv_create_qp_ex(context, &attr);
}

static void *make_xrc_srq(void)
{
	struct ibv_srq_init_attr_ex attr = { .attr = { .max_wr = 100, .max_sge = 1 },
		.srq_type = IBV_SRQT_XRC, .pd = pd, .cq = cq, .xrcd = object,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ |
			IBV_SRQ_INIT_ATTR_XRCD };

	return ibv_create_srq_ex(context, &attr);
}

static void tear_down_xrcd(void) { CODE(0, ibv_close_xrcd(object)); }
static void *make_xrc_initiator(void) { return make_qp_of(IBV_QPT_XRC_SEND); }
static void set_up_qp(void) { NEED((object = make_qp())); }

static int to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	return ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS);
}

static void set_up_init_qp(void)
{
	set_up_qp();
	CODE(0, to_init(object));
}

static void tear_down_qp(void) { CODE(0, ibv_destroy_qp(object)); }

/* Connects to an address without a peer. Destroying the queue pair ends the attempt. */
static void *connect_qp(void)
{
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
		.dest_qp_num = 0x7a0001, .min_rnr_timer = 12,
		.ah_attr = { .port_num = 1, .is_global = 1, .grh = { .dgid = gid, .hop_limit = 1 } } };

	return null_if_error(ibv_modify_qp(object, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
		IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
}

static void set_up_qp_and_counter(void) { NEED((object = make_comp_cntr())); }
static void *attach(void) { return null_if_error(attach_comp_cntr(idle_qp, object,
	&(struct comp_cntr_attach){ .op_mask = 63 })); }

/* A counter stays attached until the queue pair is destroyed. */
static int detach(void *p)
{
	(void)p;
	CODE(0, ibv_destroy_qp(idle_qp));
	NEED((idle_qp = make_qp()));
	return 0;
}

static void tear_down_counter(void) { CODE(0, destroy_comp_cntr(object)); }

/* A call of the data path. It must not allocate memory. */
static void *post_recv(void)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_recv_wr list[64], *bad;

	for (int i = 0; i < 64; i++)
		list[i] = (struct ibv_recv_wr){ .next = i < 63 ? list + i + 1 : NULL, .sg_list = &sge,
			.num_sge = 1 };
	return null_if_error(ibv_post_recv(object, list, &bad));
}

/* Posts more requests than the library keeps on the stack. */
static void *post_batch(void)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(ex_qp);
	int code;

	ibv_wr_start(ex);
	for (int i = 0; i < 60; i++) {
		ibv_wr_send(ex);
		ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
	}
	code = ibv_wr_complete(ex);
	/* In RESET and INIT, ibv_wr_complete returns EINVAL. */
	return null_if_error(code == EINVAL ? 0 : code);
}

static void *poll_all(void)
{
	struct ibv_wc wc[200];

	return ibv_poll_cq(cq, 200, wc) >= 0 ? memory : NULL;
}

static void *query(void)
{
	struct ibv_device_attr_ex device;
	struct ibv_port_attr port;
	struct ibv_gid_entry entries[256];
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	union ibv_gid found;
	int code = ibv_query_device_ex(context, NULL, &device);

	if (!code)
		code = ibv_query_port(context, 1, &port);
	if (!code)
		code = ibv_query_qp(idle_qp, &attr, IBV_QP_STATE, &init);
	if (!code && ibv_query_gid(context, 1, 0, &found))
		code = errno;
	if (!code && ibv_query_gid_table(context, entries, 256, 0) <= 0)
		code = ENOMEM;
	return null_if_error(code);
}

static void *join_group(void)
{
	union ibv_gid group =
		{ .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 9, [14] = 8, [15] = 7 } };

	return null_if_error(ibv_attach_mcast(ud_qp, &group, 0));
}

static int leave_group(void *p)
{
	union ibv_gid group =
		{ .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 9, [14] = 8, [15] = 7 } };

	(void)p;
	return ibv_detach_mcast(ud_qp, &group, 0);
}

static void *make_events(void) { return rdma_create_event_channel(); }

static int drop_events(void *p)
{
	rdma_destroy_event_channel(p);
	return 0;
}

static void *make_id(void)
{
	struct rdma_cm_id *id;

	return rdma_create_id(events, &id, NULL, RDMA_PS_TCP) ? NULL : id;
}

static int drop_id(void *p) { return rdma_destroy_id(p); }

/* Without an event channel, the calls are synchronous. */
static void set_up_id(void)
{
	struct rdma_cm_id *id;

	NEED(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	object = id;
}

static void tear_down_id(void) { CODE(0, rdma_destroy_id(object)); }
static void *bind_id(void) { return null_if_error(rdma_bind_addr(object,
	(struct sockaddr *)&loopback)); }
static void *resolve_id(void) { return null_if_error(rdma_resolve_addr(object, NULL,
	(struct sockaddr *)&loopback, 2000)); }

static void set_up_bound(void)
{
	set_up_id();
	NEED(bind_id());
}

static void *listen_id(void) { return null_if_error(rdma_listen(object, 5)); }

static void set_up_resolved(void)
{
	struct sockaddr_in to = loopback;

	set_up_id();
	to.sin_port = htons(9);
	NEED(rdma_resolve_addr(object, NULL, (struct sockaddr *)&to, 2000) == 0);
	NEED(rdma_resolve_route(object, 2000) == 0);
}

static void *make_id_qp(void)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 0 } };

	return null_if_error(rdma_create_qp(object, NULL, &attr));
}

static int drop_id_qp(void *p)
{
	(void)p;
	rdma_destroy_qp(object);
	return 0;
}

static void *make_addrinfo(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP }, *found;

	return rdma_getaddrinfo("127.0.0.1", "7471", &hints, &found) ? NULL : found;
}

static int drop_addrinfo(void *p)
{
	rdma_freeaddrinfo(p);
	return 0;
}

static void set_up_addrinfo(void) { NEED((object = make_addrinfo())); }
static void tear_down_addrinfo(void) { rdma_freeaddrinfo(object); }

static void *make_endpoint(void)
{
	struct rdma_cm_id *id;

	return rdma_create_ep(&id, object, NULL, NULL) ? NULL : id;
}

static int drop_endpoint(void *p)
{
	rdma_destroy_ep(p);
	return 0;
}

static void *make_devices(void) { return rdma_get_devices(NULL); }

static int drop_devices(void *p)
{
	rdma_free_devices(p);
	return 0;
}

/* An rsocket is a descriptor. So the row's object is the address `memory` plus this number. */
static void *make_rsocket(void)
{
	int s = rsocket(AF_INET, SOCK_STREAM, 0);

	return s < 0 ? NULL : memory + s;
}

static int drop_rsocket(void *p) { return rclose((char *)p - memory); }
static void set_up_rsocket(void) { NEED((object = make_rsocket())); }
static int rsocket_number(void) { return (char *)object - memory; }
static void *bind_rsocket(void) { return null_if_error(rbind(rsocket_number(),
	(struct sockaddr *)&loopback,
	sizeof(loopback))); }

static void set_up_bound_rsocket(void)
{
	set_up_rsocket();
	NEED(bind_rsocket());
}

static void *listen_rsocket(void) { return null_if_error(rlisten(rsocket_number(), 3)); }
static void tear_down_rsocket(void) { CODE(0, rclose(rsocket_number())); }

static const struct {
	const char *name;
	void *(*make)(void);
	int (*drop)(void *);
	void (*set_up)(void), (*tear_down)(void);
} rows[] = {
	{ "protection domain", make_pd, drop_pd, NULL, NULL },
	{ "imported protection domain", make_imported_pd, drop_imported_pd, NULL, NULL },
	{ "thread domain", make_td, drop_td, NULL, NULL },
	{ "parent domain", make_parent, drop_pd, NULL, NULL },
	{ "completion channel", make_channel, drop_channel, NULL, NULL },
	{ "completion queue", make_cq, drop_cq, NULL, NULL },
	{ "extended completion queue", make_cq_ex, drop_cq, NULL, NULL },
	{ "resize a completion queue", resize_cq, nothing, set_up_cq, tear_down_cq },
	{ "memory region", make_mr, drop_mr, NULL, NULL },
	{ "on-demand region", make_on_demand, drop_mr, NULL, NULL },
	{ "null region", make_null_mr, drop_mr, NULL, NULL },
	{ "imported region", make_imported_mr, drop_imported_mr, NULL, NULL },
	{ "change a region", rereg_mr, nothing, set_up_mr, tear_down_mr },
	{ "memory window", make_mw, drop_mw, NULL, NULL },
	{ "device memory", make_dm, drop_dm, NULL, NULL },
	{ "region of device memory", make_dm_mr, drop_mr, set_up_dm, tear_down_dm },
	{ "buffer", make_buf, drop_buf, NULL, NULL },
	{ "address handle", make_ah, drop_ah, NULL, NULL },
	{ "completion counter", make_comp_cntr, drop_comp_cntr, NULL, NULL },
	{ "attach a counter", attach, detach, set_up_qp_and_counter, tear_down_counter },
	{ "XRC domain", make_xrcd, drop_xrcd, NULL, NULL },
	{ "shared receive queue", make_srq, drop_srq, NULL, NULL },
	{ "XRC shared receive queue", make_xrc_srq, drop_srq, set_up_xrcd, tear_down_xrcd },
	{ "tag matching queue", make_tag_srq, drop_srq, NULL, NULL },
	{ "resize a shared receive queue", modify_srq, nothing, set_up_srq, tear_down_srq },
	{ "queue pair", make_qp, drop_qp, NULL, NULL },
	{ "extended queue pair", make_qp_ex, drop_qp, NULL, NULL },
	{ "unreliable queue pair", make_uc_qp, drop_qp, NULL, NULL },
	{ "datagram queue pair", make_ud_qp, drop_qp, NULL, NULL },
	{ "XRC initiator", make_xrc_initiator, drop_qp, NULL, NULL },
	{ "XRC target", make_xrc_target, drop_qp, set_up_xrcd, tear_down_xrcd },
	{ "tag matching queue pair", make_tag_qp, drop_qp, NULL, NULL },
	{ "connect by number", connect_qp, nothing, set_up_init_qp, tear_down_qp },
	{ "post receives", post_recv, nothing, set_up_init_qp, tear_down_qp },
	{ "post a batch", post_batch, nothing, NULL, NULL },
	{ "poll", poll_all, nothing, NULL, NULL },
	{ "query", query, nothing, NULL, NULL },
	{ "join a group", join_group, leave_group, NULL, NULL },
	{ "event channel", make_events, drop_events, NULL, NULL },
	{ "identifier", make_id, drop_id, NULL, NULL },
	{ "bind an identifier", bind_id, nothing, set_up_id, tear_down_id },
	{ "resolve an identifier", resolve_id, nothing, set_up_id, tear_down_id },
	{ "listen", listen_id, nothing, set_up_bound, tear_down_id },
	{ "queue pair of an identifier", make_id_qp, drop_id_qp, set_up_resolved, tear_down_id },
	{ "addresses", make_addrinfo, drop_addrinfo, NULL, NULL },
	{ "endpoint", make_endpoint, drop_endpoint, set_up_addrinfo, tear_down_addrinfo },
	{ "contexts of the connection manager", make_devices, drop_devices, NULL, NULL },
	{ "rsocket", make_rsocket, drop_rsocket, NULL, NULL },
	{ "bind an rsocket", bind_rsocket, nothing, set_up_rsocket, tear_down_rsocket },
	{ "listen at an rsocket", listen_rsocket, nothing, set_up_bound_rsocket, tear_down_rsocket },
	{ "context", make_context, drop_context, NULL, NULL },
	{ "device list", make_list, drop_list, NULL, NULL },
};

/* Runs a row whose allocation number n fails. Returns 1 if the call failed, -1 if it made fewer
 * allocations, and 0 otherwise. */
static int attempt(size_t row, long n)
{
	void *made;
	int code, did_fail;

	if (rows[row].set_up)
		rows[row].set_up();
	some_failed = 0;
	allocations_left = n;
	errno = 0;
	made = rows[row].make();
	code = errno;
	allocations_left = -1;
	did_fail = some_failed;
	if (!made) {
		if (code != ENOMEM)
			fprintf(stderr, "%s, allocation %ld: %s\n", rows[row].name, n, strerror(code));
		CODE(ENOMEM, code);
		/* The failed call had no effect, so the next call succeeds. */
		errno = 0;
		if (!(made = rows[row].make()))
			fprintf(stderr, "%s, after allocation %ld: %s\n", rows[row].name, n, strerror(errno));
		CHECK(made);
	}
	if (made)
		CODE(0, rows[row].drop(made));
	if (rows[row].tear_down)
		rows[row].tear_down();
	if (!did_fail)
		return -1;
	return code == ENOMEM;
}

/* Makes each allocation of a row fail. Returns the number of failed calls. */
static int sweep(size_t row)
{
	int failed = 0, result;

	for (fail_all_later = 0; fail_all_later < 2; fail_all_later++)
		for (long n = 0; (result = attempt(row, n)) >= 0; n++) {
			failed += result;
			NEED(n < 10000);
		}
	return failed;
}

static int is_wanted(const char *name, char **names)
{
	/* The first argument may be the face of the devices. */
	if (*names && (!strcmp(*names, "rnic") || !strcmp(*names, "roce")))
		names++;
	if (!*names)
		return 1;
	while (*names)
		if (!strcmp(*names++, name))
			return 1;
	return 0;
}

static void set_up_shared_objects(void)
{
	devices = ibv_get_device_list(NULL);
	NEED(devices && devices[0]);
	context = ibv_open_device(devices[0]);
	NEED(context);
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 4000, NULL, NULL, 0);
	events = rdma_create_event_channel();
	comp_channel = ibv_create_comp_channel(context);
	NEED(pd && cq && events && comp_channel);
	NEED((mr = make_mr()) && (tag_srq = make_tag_srq()));
	NEED((idle_qp = make_qp()) && (ud_qp = make_ud_qp()) && (ex_qp = make_qp_ex()));
	NEED(ibv_query_gid(context, 1, 0, &gid) == 0);
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 1 };
	CODE(0, ibv_modify_qp(ud_qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	loopback = (struct sockaddr_in){ .sin_family = AF_INET,
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
}

/* Returns the number of allocations minus `before`. Waits up to 2 seconds for the clean-up by the
 * library's threads. */
static long remaining(long before)
{
	for (int i = 0; i < 200 && allocated - before >= SWEEPS; i++)
		usleep(10000);
	return allocated - before;
}

int main(int argc, char **argv)
{
	(void)argc;
	thread_atexit = dlsym(RTLD_DEFAULT, "__cxa_thread_atexit_impl");
	set_up_shared_objects();
	for (size_t row = 0; row < sizeof(rows) / sizeof(*rows); row++) {
		long unfreed = SWEEPS;
		int failed = 0;

		if (!is_wanted(rows[row].name, argv + 1))
			continue;
		/* The first sweep also creates objects that the library keeps for later calls. */
		sweep(row);
		sweep(row);
		/* A leak grows in every sweep; a starting thread or a growing table does not. */
		for (int round = 0; round < 3 && unfreed >= SWEEPS; round++) {
			long before = allocated;

			for (int i = 0; i < SWEEPS; i++)
				failed += sweep(row);
			unfreed = remaining(before);
		}
		if (unfreed >= SWEEPS)
			fprintf(stderr, "%s: %ld allocations were not freed\n", rows[row].name, unfreed);
		CHECK(unfreed < SWEEPS);
		printf("%s: %d calls failed with ENOMEM\n", rows[row].name, failed);
	}
	return result();
}
