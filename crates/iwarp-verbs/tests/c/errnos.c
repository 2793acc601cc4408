/* Makes the wrong calls of docs/errno.md, and writes each result to standard error. The program
 * runs with any library and iWARP device; its last argument is an address of the device. The test
 * compares the output on this library with `errnos-siw.txt`, the output on Linux's siw. */
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <arpa/inet.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>

#include "check.h"

enum { DEPTH = 8, HANDLES = 64 };

static struct ibv_context *context, *other;
static struct ibv_pd *pd, *other_pd;
static struct ibv_cq *cq, *other_cq;
static struct ibv_mr *mr;
static struct ibv_srq *srq;
static struct rdma_cm_id *id, *accepted;
static char memory[8192];
static struct ibv_sge sge[3];

static const char *errno_name(int error)
{
	switch (error) {
	case 0: return "0";
	case EBADF: return "EBADF";
	case EBUSY: return "EBUSY";
	case EFAULT: return "EFAULT";
	case EINVAL: return "EINVAL";
	case ENOENT: return "ENOENT";
	case ENOMEM: return "ENOMEM";
	case ENOSYS: return "ENOSYS";
	case ENOTCONN: return "ENOTCONN";
	case EOPNOTSUPP: return "EOPNOTSUPP";
	case EPERM: return "EPERM";
	default: return strerror(error);
	}
}

/* siw's provider returns some errors as negative numbers, and others as -1 with errno. */
static void print_result(const char *call, int error)
{
	if (error == -1)
		fprintf(stderr, "%s: -1, %s\n", call, errno_name(errno));
	else
		fprintf(stderr, "%s: %s%s\n", call, error < 0 ? "-" : "", errno_name(abs(error)));
}

static void print_post_result(const char *call, int error, const void *bad)
{
	if (error == 0 && bad)
		fprintf(stderr, "%s: 0, bad_wr\n", call);
	else
		print_result(call, error);
}

#define CALL(what, call) print_result(what, (call))
#define MAKE(what, call) print_result(what, (call) ? 0 : errno)
#define POST(what, call) (bad = NULL, result = (call), print_post_result(what, result, bad))

static struct ibv_qp_init_attr default_attributes(void)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 2, .max_recv_sge = 1,
			.max_inline_data = 64 } };

	return attr;
}

static struct ibv_qp *new_qp(void)
{
	struct ibv_qp_init_attr attr = default_attributes();
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	NEED(qp);
	return qp;
}

static struct rdma_cm_id *next_event(struct rdma_event_channel *channel,
	enum rdma_cm_event_type want)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *from;

	NEED(rdma_get_cm_event(channel, &event) == 0);
	if (event->event != want) {
		fprintf(stderr, "%s instead of %s\n", rdma_event_str(event->event), rdma_event_str(want));
		exit(2);
	}
	from = event->id;
	NEED(rdma_ack_cm_event(event) == 0);
	return from;
}

static void create_objects(void)
{
	int i;

	context = id->verbs;
	other = ibv_open_device(context->device);
	NEED(other);
	/* The other context must have objects with numbers that do not exist in this context. */
	for (i = 0; i < HANDLES; i++)
		NEED((other_pd = ibv_alloc_pd(other)));
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	other_cq = ibv_create_cq(other, 64, NULL, NULL, 0);
	NEED(pd && cq && other_cq);
	mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	struct ibv_srq_init_attr queue = { .attr = { .max_wr = 4, .max_sge = 1 } };
	srq = ibv_create_srq(pd, &queue);
	NEED(mr && srq);
	for (i = 0; i < 3; i++)
		sge[i] = (struct ibv_sge){ (uintptr_t)memory, 8, mr->lkey };
}

static void connect_to(const char *address)
{
	struct rdma_event_channel *passive = rdma_create_event_channel(),
		*active = rdma_create_event_channel();
	struct sockaddr_in to = { .sin_family = AF_INET };
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct ibv_qp_init_attr attr;
	struct rdma_cm_id *listener;

	NEED(passive && active && inet_pton(AF_INET, address, &to.sin_addr) == 1);
	NEED(rdma_create_id(passive, &listener, NULL, RDMA_PS_TCP) == 0 &&
		rdma_create_id(active, &id, NULL, RDMA_PS_TCP) == 0);
	NEED(rdma_bind_addr(listener, (struct sockaddr *)&to) == 0 && rdma_listen(listener, 1) == 0);
	to.sin_port = rdma_get_src_port(listener);
	NEED(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000) == 0);
	next_event(active, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(rdma_resolve_route(id, 2000) == 0);
	next_event(active, RDMA_CM_EVENT_ROUTE_RESOLVED);
	create_objects();
	attr = default_attributes();
	NEED(rdma_create_qp(id, pd, &attr) == 0 && rdma_connect(id, &param) == 0);
	accepted = next_event(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
	attr = default_attributes();
	NEED(rdma_create_qp(accepted, pd, &attr) == 0 && rdma_accept(accepted, &param) == 0);
	next_event(active, RDMA_CM_EVENT_ESTABLISHED);
	next_event(passive, RDMA_CM_EVENT_ESTABLISHED);
}

static void test_registrations(void)
{
	const int write = IBV_ACCESS_LOCAL_WRITE;
	char *hole = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *fixed = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	NEED(hole != MAP_FAILED && fixed != MAP_FAILED && munmap(hole + 4096, 4096) == 0);
	MAKE("ibv_reg_mr of no octets", ibv_reg_mr(pd, memory, 0, write));
	MAKE("ibv_reg_mr beyond the address space", ibv_reg_mr(pd, (void *)-4096L, 8192, write));
	MAKE("ibv_reg_mr into a hole", ibv_reg_mr(pd, hole, 8192, write));
	MAKE("ibv_reg_mr of read-only memory with local write", ibv_reg_mr(pd, fixed, 4096, write));
	MAKE("ibv_reg_mr with remote write only", ibv_reg_mr(pd, memory, 8, IBV_ACCESS_REMOTE_WRITE));
	MAKE("ibv_reg_mr with remote atomic only", ibv_reg_mr(pd, memory, 8, IBV_ACCESS_REMOTE_ATOMIC));
}

static struct ibv_qp *create_of_type(int type)
{
	struct ibv_qp_init_attr attr = default_attributes();

	attr.qp_type = type;
	return ibv_create_qp(pd, &attr);
}

static void test_queue_pairs(void)
{
	struct ibv_qp_init_attr attr = default_attributes();

	MAKE("ibv_create_qp of type 0", create_of_type(0));
	MAKE("ibv_create_qp of type 100", create_of_type(100));
	MAKE("ibv_create_qp for raw packets", create_of_type(IBV_QPT_RAW_PACKET));
	attr.send_cq = other_cq;
	MAKE("ibv_create_qp with a completion queue of another context", ibv_create_qp(pd, &attr));
	attr = default_attributes();
	MAKE("ibv_create_qp with a protection domain of another context", ibv_create_qp(other_pd, &attr));
	attr = default_attributes();
	attr.cap.max_send_wr = UINT32_MAX;
	MAKE("ibv_create_qp with too many send requests", ibv_create_qp(pd, &attr));
	attr = default_attributes();
	attr.cap.max_recv_sge = 1000;
	MAKE("ibv_create_qp with too many elements of a receive", ibv_create_qp(pd, &attr));
	attr = default_attributes();
	attr.srq = srq;
	attr.cap.max_recv_wr = attr.cap.max_recv_sge = UINT32_MAX;
	MAKE("ibv_create_qp with a shared receive queue and sizes above all limits",
		ibv_create_qp(pd, &attr));
	MAKE("ibv_create_cq of no entries", ibv_create_cq(context, 0, NULL, NULL, 0));
	MAKE("ibv_create_cq with vector 1000", ibv_create_cq(context, 4, NULL, NULL, 1000));
	CALL("ibv_destroy_cq in use", ibv_destroy_cq(cq));
	CALL("ibv_dealloc_pd in use", ibv_dealloc_pd(pd));
}

static void test_sends(void)
{
	struct ibv_send_wr wr = { .sg_list = sge, .num_sge = 1, .opcode = 100 }, *bad;
	struct ibv_qp *qp = accepted->qp, *unused = new_qp();
	int result;

	POST("ibv_post_send with opcode 100", ibv_post_send(qp, &wr, &bad));
	wr.opcode = IBV_WR_RDMA_READ;
	wr.send_flags = IBV_SEND_INLINE;
	POST("ibv_post_send of an inline Read", ibv_post_send(qp, &wr, &bad));
	wr.opcode = IBV_WR_SEND;
	sge[0].length = sizeof(memory);
	POST("ibv_post_send with too much inline data", ibv_post_send(qp, &wr, &bad));
	sge[0].length = 8;
	wr.send_flags = 0;
	POST("ibv_post_send in RESET", ibv_post_send(unused, &wr, &bad));
	/* siw's provider does not refuse this request. */
	wr.num_sge = 3;
	POST("ibv_post_send with too many elements", ibv_post_send(qp, &wr, &bad));
	NEED(ibv_destroy_qp(unused) == 0);
}

static void test_receives(void)
{
	struct ibv_recv_wr wr = { .sg_list = sge, .num_sge = 2 }, *bad;
	struct ibv_qp *unused = new_qp();
	int i, result = 0;

	POST("ibv_post_recv with too many elements", ibv_post_recv(id->qp, &wr, &bad));
	POST("ibv_post_srq_recv with too many elements", ibv_post_srq_recv(srq, &wr, &bad));
	wr.num_sge = 1;
	POST("ibv_post_recv in RESET", ibv_post_recv(unused, &wr, &bad));
	for (i = 0; i < DEPTH - 1 && result == 0; i++)
		result = ibv_post_recv(unused, &wr, &bad);
	CHECK(result == 0);
	POST("ibv_post_recv into a full queue", ibv_post_recv(unused, &wr, &bad));
	NEED(ibv_destroy_qp(unused) == 0);
}

static const char *const last_call = "ibv_post_recv with a shared receive queue";

static void print_sigfpe(int signal)
{
	(void)signal;
	fprintf(stderr, "%s: SIGFPE\n", last_call);
	exit(0);
}

/* siw's provider divides by the depth of the receive queue, so this comes last. */
static void test_receive_with_srq(void)
{
	struct ibv_recv_wr wr = { .num_sge = 0 }, *bad;
	struct ibv_qp_init_attr attr = default_attributes();
	struct ibv_qp *qp;
	int result;

	attr.srq = srq;
	attr.cap.max_recv_wr = attr.cap.max_recv_sge = 0;
	NEED((qp = ibv_create_qp(pd, &attr)));
	signal(SIGFPE, print_sigfpe);
	POST(last_call, ibv_post_recv(qp, &wr, &bad));
}

static void test_srq(void)
{
	struct ibv_srq_attr attr = { .max_wr = 4, .srq_limit = 1000 };

	CALL("ibv_modify_srq with a limit above the depth", ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
	CALL("ibv_modify_srq with a limit above the new depth",
		ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT));
}

static int change_state(struct ibv_qp *qp, enum ibv_qp_state to, int more)
{
	struct ibv_qp_attr attr = { .qp_state = to, .cur_qp_state = IBV_QPS_RTS, .dest_qp_num = 5,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ };

	return ibv_modify_qp(qp, &attr, more | (to == IBV_QPS_UNKNOWN ? 0 : IBV_QP_STATE));
}

static void test_state_changes(void)
{
	static const struct {
		const char *call;
		enum ibv_qp_state to;
	} idle[] = {
		{ "ibv_modify_qp of RESET to RTR", IBV_QPS_RTR },
		{ "ibv_modify_qp of RESET to RTS", IBV_QPS_RTS },
		{ "ibv_modify_qp of RESET to ERR", IBV_QPS_ERR },
	}, connected[] = {
		{ "ibv_modify_qp of a connection in RTS to RTR", IBV_QPS_RTR },
		{ "ibv_modify_qp of a connection in RTS to INIT", IBV_QPS_INIT },
	};
	unsigned int i;

	for (i = 0; i < sizeof(idle) / sizeof(idle[0]); i++) {
		struct ibv_qp *qp = new_qp();

		CALL(idle[i].call, change_state(qp, idle[i].to, 0));
		NEED(ibv_destroy_qp(qp) == 0);
	}
	CALL("ibv_modify_qp of rights in RTS", change_state(id->qp, IBV_QPS_UNKNOWN, IBV_QP_ACCESS_FLAGS));
	for (i = 0; i < sizeof(connected) / sizeof(connected[0]); i++)
		CALL(connected[i].call, change_state(id->qp, connected[i].to, 0));
	CALL("ibv_modify_qp of a peer in RTS", change_state(id->qp, IBV_QPS_UNKNOWN, IBV_QP_DEST_QPN));
	CALL("ibv_modify_qp of a rate limit", change_state(id->qp, IBV_QPS_UNKNOWN, IBV_QP_RATE_LIMIT));
	CALL("ibv_modify_qp of an unknown attribute", change_state(id->qp, IBV_QPS_UNKNOWN, 1 << 30));
}

/* The requests are in one list, so that none completes before the last is posted. */
static void test_full_send_queue(void)
{
	struct ibv_send_wr list[1000], *bad;
	int i, result;

	memset(list, 0, sizeof(list));
	for (i = 0; i < 1000; i++) {
		list[i].opcode = IBV_WR_RDMA_WRITE;
		list[i].next = i < 999 ? &list[i + 1] : NULL;
	}
	POST("ibv_post_send into a full queue", ibv_post_send(id->qp, list, &bad));
}

int main(int argc, char **argv)
{
	NEED(argc > 1);
	connect_to(argv[argc - 1]);
	test_registrations();
	test_srq();
	test_queue_pairs();
	test_state_changes();
	test_full_send_queue();
	test_sends();
	test_receives();
	test_receive_with_srq();
	return result();
}
