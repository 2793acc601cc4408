/* Tests of each injected fault through the verbs. A fault specification in the environment applies
 * to the device that the test opens next. The peer is a queue pair on a device without faults. */
#include "check.h"

#include <infiniband/verbs.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

enum { SIZE = 4096, DEPTH = 64, TIMEOUT_MS = 20000 };

struct end {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	union ibv_gid gid;
	char memory[SIZE];
};

static int specs;
/* The end with the fault, and its peer. */
static struct end faulty, plain;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static struct ibv_context *open_with(const char *faults)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;
	char spec[256];

	NEED(list && list[0]);
	if (faults) {
		/* Devices with identical specifications share the state of the faults. So the padding
		 * makes each specification different. */
		snprintf(spec, sizeof(spec), "%s;seed=7%*s;", faults, ++specs, "");
		setenv("IWARP_FAULT", spec, 1);
	} else {
		unsetenv("IWARP_FAULT");
	}
	context = ibv_open_device(list[0]);
	NEED(context);
	unsetenv("IWARP_FAULT");
	ibv_free_device_list(list);
	return context;
}

static void create_end(struct end *e, const char *faults)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

	e->context = open_with(faults);
	e->pd = ibv_alloc_pd(e->context);
	NEED(e->pd && ibv_query_gid(e->context, 1, 0, &e->gid) == 0);
	e->mr = ibv_reg_mr(e->pd, e->memory, SIZE, init.qp_access_flags);
	e->cq = ibv_create_cq(e->context, 4 * DEPTH, e, NULL, 0);
	NEED(e->mr && e->cq);
	attr.send_cq = attr.recv_cq = e->cq;
	e->qp = ibv_create_qp(e->pd, &attr);
	NEED(e->qp);
	NEED(ibv_modify_qp(e->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS) == 0);
}

static void move_to_rts(struct end *e, const struct end *peer, int rnr_retry)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .dest_qp_num = peer->qp->qp_num,
		.min_rnr_timer = 1, .path_mtu = IBV_MTU_1024, .max_dest_rd_atomic = 1,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = peer->gid } } };

	NEED(ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
		IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
		.rnr_retry = rnr_retry, .max_rd_atomic = 1 };
	NEED(ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

/* Creates and connects both ends. */
static void create_both(const char *faults, int rnr_retry)
{
	create_end(&faulty, faults);
	create_end(&plain, NULL);
	move_to_rts(&faulty, &plain, 7);
	move_to_rts(&plain, &faulty, rnr_retry);
}

static void destroy_end(struct end *e)
{
	CODE(0, ibv_destroy_qp(e->qp));
	CODE(0, ibv_destroy_cq(e->cq));
	CODE(0, ibv_dereg_mr(e->mr));
	CODE(0, ibv_dealloc_pd(e->pd));
	CODE(0, ibv_close_device(e->context));
}

static void destroy_both(void)
{
	destroy_end(&faulty);
	destroy_end(&plain);
}

static int post(struct end *e, const struct end *peer, enum ibv_wr_opcode opcode, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)e->memory, 64, e->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = opcode }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)peer->memory;
	wr.wr.rdma.rkey = peer->mr->rkey;
	return ibv_post_send(e->qp, &wr, &bad);
}

static int receive(struct end *e, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)e->memory, SIZE, e->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	return ibv_post_recv(e->qp, &wr, &bad);
}

static struct ibv_wc next_completion(struct end *e)
{
	struct ibv_wc wc;
	int n, left;

	for (left = TIMEOUT_MS; left > 0; left--) {
		n = ibv_poll_cq(e->cq, 1, &wc);
		NEED(n >= 0);
		if (n)
			return wc;
		usleep(1000);
	}
	NEED(!"no completion before the timeout");
	return wc;
}

static void expect_completion(struct end *e, uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc = next_completion(e);

	CODE((int)id, (int)wc.wr_id);
	CODE((int)status, (int)wc.status);
}

static int state(const struct end *e)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;

	NEED(ibv_query_qp(e->qp, &a, IBV_QP_STATE, &i) == 0);
	return a.qp_state;
}

static int port_state(const struct end *e)
{
	struct ibv_port_attr a;

	NEED(ibv_query_port(e->context, 1, &a) == 0);
	/* The InfiniBand specification's numbers for LinkUp and Disabled. */
	CODE(a.state == IBV_PORT_ACTIVE ? 5 : 3, a.phys_state);
	return a.state;
}

/* Waits for an event of this type. Earlier events are other effects of the fault. */
static void expect_event(struct end *e, enum ibv_event_type type)
{
	struct ibv_async_event event;
	int found;

	do {
		NEED(ibv_get_async_event(e->context, &event) == 0);
		found = event.event_type == type;
		if (found && (type == IBV_EVENT_PORT_ERR || type == IBV_EVENT_PORT_ACTIVE))
			CODE(1, event.element.port_num);
		else if (found && type == IBV_EVENT_CQ_ERR)
			CHECK(event.element.cq == e->cq);
		else if (found && type <= IBV_EVENT_SQ_DRAINED)
			CHECK(event.element.qp == e->qp);
		ibv_ack_async_event(&event);
	} while (!found);
	checks++;
}

static void test_statuses(void)
{
	static const struct {
		const char *name;
		enum ibv_wc_status status;
	} all[] = {
		{ "LOC_LEN_ERR", IBV_WC_LOC_LEN_ERR }, { "LOC_QP_OP_ERR", IBV_WC_LOC_QP_OP_ERR },
		{ "LOC_PROT_ERR", IBV_WC_LOC_PROT_ERR }, { "WR_FLUSH_ERR", IBV_WC_WR_FLUSH_ERR },
		{ "MW_BIND_ERR", IBV_WC_MW_BIND_ERR }, { "BAD_RESP_ERR", IBV_WC_BAD_RESP_ERR },
		{ "LOC_ACCESS_ERR", IBV_WC_LOC_ACCESS_ERR }, { "REM_INV_REQ_ERR", IBV_WC_REM_INV_REQ_ERR },
		{ "REM_ACCESS_ERR", IBV_WC_REM_ACCESS_ERR }, { "REM_OP_ERR", IBV_WC_REM_OP_ERR },
		{ "RETRY_EXC_ERR", IBV_WC_RETRY_EXC_ERR }, { "RNR_RETRY_EXC_ERR", IBV_WC_RNR_RETRY_EXC_ERR },
		{ "FATAL_ERR", IBV_WC_FATAL_ERR }, { "RESP_TIMEOUT_ERR", IBV_WC_RESP_TIMEOUT_ERR },
		{ "GENERAL_ERR", IBV_WC_GENERAL_ERR },
	};
	char faults[80];
	size_t i;

	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
		snprintf(faults, sizeof(faults), "status=%s,op=write,nth=2", all[i].name);
		create_both(faults, 7);
		CODE(0, receive(&faulty, 9));
		CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 1));
		expect_completion(&faulty, 1, IBV_WC_SUCCESS);
		CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 2));
		CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 3));
		expect_completion(&faulty, 2, all[i].status);
		/* The two flush completions come in an order that depends on timing. */
		CODE(IBV_WC_WR_FLUSH_ERR, next_completion(&faulty).status);
		CODE(IBV_WC_WR_FLUSH_ERR, next_completion(&faulty).status);
		CODE(IBV_QPS_ERR, state(&faulty));
		destroy_both();
	}
	/* With one post of several requests, the requests after the failed one are flushed, although
	 * the peer has received them. */
	create_both("status=REM_OP_ERR,op=write,nth=2", 7);
	{
		struct ibv_sge sge = { (uintptr_t)faulty.memory, 64, faulty.mr->lkey };
		struct ibv_send_wr wr[8], *bad;

		for (i = 0; i < 8; i++) {
			wr[i] = (struct ibv_send_wr){ .wr_id = i, .next = i < 7 ? &wr[i + 1] : NULL, .sg_list = &sge,
				.num_sge = 1, .opcode = IBV_WR_RDMA_WRITE };
			wr[i].wr.rdma.remote_addr = (uintptr_t)plain.memory;
			wr[i].wr.rdma.rkey = plain.mr->rkey;
		}
		CODE(0, ibv_post_send(faulty.qp, wr, &bad));
	}
	expect_completion(&faulty, 0, IBV_WC_SUCCESS);
	expect_completion(&faulty, 1, IBV_WC_REM_OP_ERR);
	for (i = 2; i < 8; i++)
		expect_completion(&faulty, i, IBV_WC_WR_FLUSH_ERR);
	destroy_both();
	create_both("status=LOC_LEN_ERR,op=recv,nth=2", 7);
	for (i = 1; i <= 3; i++)
		CODE(0, receive(&faulty, i));
	CODE(0, post(&plain, &faulty, IBV_WR_SEND, 1));
	expect_completion(&faulty, 1, IBV_WC_SUCCESS);
	CODE(0, post(&plain, &faulty, IBV_WR_SEND, 2));
	expect_completion(&faulty, 2, IBV_WC_LOC_LEN_ERR);
	expect_completion(&faulty, 3, IBV_WC_WR_FLUSH_ERR);
	destroy_both();
}

static void test_full_queues(void)
{
	struct ibv_sge sge;
	struct ibv_send_wr wr[5], *bad = NULL;
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_recv_wr recv = { .wr_id = 1 }, *bad_recv;
	struct ibv_srq *srq;
	int i;

	create_both("post,op=send,nth=3;post,op=recv,nth=2", 7);
	CODE(0, receive(&faulty, 1));
	CODE(ENOMEM, receive(&faulty, 2));
	CODE(0, receive(&faulty, 3));
	for (i = 0; i < 5; i++)
		CODE(0, receive(&plain, i));
	sge = (struct ibv_sge){ (uintptr_t)faulty.memory, 1, faulty.mr->lkey };
	for (i = 0; i < 5; i++)
		wr[i] = (struct ibv_send_wr){ .wr_id = i, .next = i < 4 ? &wr[i + 1] : NULL, .sg_list = &sge,
			.num_sge = 1, .opcode = IBV_WR_SEND };
	CODE(ENOMEM, ibv_post_send(faulty.qp, wr, &bad));
	CHECK(bad == &wr[2]);
	CODE(0, ibv_post_send(faulty.qp, bad, &bad));
	for (i = 0; i < 5; i++)
		expect_completion(&faulty, i, IBV_WC_SUCCESS);
	CODE(IBV_QPS_RTS, state(&faulty));
	destroy_both();
	create_end(&faulty, "post,nth=2");
	srq = ibv_create_srq(faulty.pd, &attr);
	NEED(srq);
	CODE(0, ibv_post_srq_recv(srq, &recv, &bad_recv));
	CODE(ENOMEM, ibv_post_srq_recv(srq, &recv, &bad_recv));
	CHECK(bad_recv == &recv);
	CODE(0, ibv_post_srq_recv(srq, &recv, &bad_recv));
	CODE(0, ibv_destroy_srq(srq));
	destroy_end(&faulty);
}

static void test_object_creation(void)
{
	struct ibv_qp_init_attr qp = { .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_pd *pd;

	/* create_end created the first region, completion queue, queue pair and protection domain. */
	create_end(&faulty,
		"create=mr,nth=2;create=mw,errno=EPERM;create=cq,nth=2,errno=EAGAIN;create=srq;"
		"create=qp,nth=2,errno=ENOSPC;create=channel,errno=EMFILE;create=pd,nth=2..3,errno=ENFILE");
	IS_NULL(ENOMEM, ibv_reg_mr(faulty.pd, faulty.memory, 1, 0));
	IS_NULL(EPERM, ibv_alloc_mw(faulty.pd, IBV_MW_TYPE_1));
	IS_NULL(EAGAIN, ibv_create_cq(faulty.context, 1, NULL, NULL, 0));
	IS_NULL(ENOMEM, ibv_create_srq(faulty.pd, &srq));
	qp.send_cq = qp.recv_cq = faulty.cq;
	IS_NULL(ENOSPC, ibv_create_qp(faulty.pd, &qp));
	IS_NULL(EMFILE, ibv_create_comp_channel(faulty.context));
	pd = ibv_alloc_pd(faulty.context);
	if (pd) {
		CODE(0, ibv_dealloc_pd(pd));
		pd = ibv_alloc_pd(faulty.context);
	}
	CHECK(!pd && errno == ENFILE);
	/* Now each rule has taken effect. */
	pd = ibv_alloc_pd(faulty.context);
	CHECK(pd);
	CODE(0, ibv_dealloc_pd(pd));
	destroy_end(&faulty);
}

static void test_events(void)
{
	static const struct {
		const char *name;
		enum ibv_event_type type;
		int fails;
	} all[] = {
		{ "QP_FATAL", IBV_EVENT_QP_FATAL, 1 }, { "QP_REQ_ERR", IBV_EVENT_QP_REQ_ERR, 1 },
		{ "QP_ACCESS_ERR", IBV_EVENT_QP_ACCESS_ERR, 1 }, { "COMM_EST", IBV_EVENT_COMM_EST, 0 },
		{ "SQ_DRAINED", IBV_EVENT_SQ_DRAINED, 0 }, { "QP_LAST_WQE_REACHED", IBV_EVENT_QP_LAST_WQE_REACHED,
			0 },
		{ "PORT_ACTIVE", IBV_EVENT_PORT_ACTIVE, 0 }, { "PORT_ERR", IBV_EVENT_PORT_ERR, 0 },
		{ "LID_CHANGE", IBV_EVENT_LID_CHANGE, 0 }, { "PKEY_CHANGE", IBV_EVENT_PKEY_CHANGE, 0 },
		{ "SM_CHANGE", IBV_EVENT_SM_CHANGE, 0 }, { "CLIENT_REREGISTER", IBV_EVENT_CLIENT_REREGISTER, 0 },
		{ "GID_CHANGE", IBV_EVENT_GID_CHANGE, 0 }, { "DEVICE_FATAL", IBV_EVENT_DEVICE_FATAL, 1 },
	};
	char faults[80];
	size_t i;

	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
		snprintf(faults, sizeof(faults), "event=%s,op=write,nth=2", all[i].name);
		create_both(faults, 7);
		CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 1));
		expect_completion(&faulty, 1, IBV_WC_SUCCESS);
		CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 2));
		expect_event(&faulty, all[i].type);
		if (all[i].fails)
			CHECK(next_completion(&faulty).status != IBV_WC_SUCCESS);
		else
			expect_completion(&faulty, 2, IBV_WC_SUCCESS);
		CODE(all[i].fails ? IBV_QPS_ERR : IBV_QPS_RTS, state(&faulty));
		destroy_both();
	}
}

static void test_lost_connections(void)
{
	static const char *const all[] = { "reset,op=write,nth=2", "reset,bytes=300",
		"close,op=write,nth=2" };
	size_t i;

	for (i = 0; i < 3; i++) {
		create_both(all[i], 7);
		CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 1));
		expect_completion(&faulty, 1, IBV_WC_SUCCESS);
		for (int id = 2; id < 8; id++)
			CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, id));
		while (next_completion(&faulty).status == IBV_WC_SUCCESS)
			;
		CODE(IBV_QPS_ERR, state(&faulty));
		destroy_both();
	}
}

static void test_cq_overflow(void)
{
	struct ibv_wc wc;
	int n;

	create_both("cq-overflow,op=write,nth=2", 7);
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 1));
	expect_completion(&faulty, 1, IBV_WC_SUCCESS);
	/* The queue is empty when the injected overflow happens. */
	CODE(0, ibv_poll_cq(faulty.cq, 1, &wc));
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 2));
	while ((n = ibv_poll_cq(faulty.cq, 1, &wc)) == 0)
		usleep(1000);
	CHECK(n < 0);
	expect_event(&faulty, IBV_EVENT_CQ_ERR);
	/* The library reports the event before it moves the queue pairs to the error state. */
	for (int i = 0; i < 10000 && state(&faulty) != IBV_QPS_ERR; i++)
		usleep(1000);
	CODE(IBV_QPS_ERR, state(&faulty));
	destroy_both();
}

static void test_remote_errors(void)
{
	create_both("remote-access,nth=2", 7);
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 1));
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 2));
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 3));
	expect_completion(&faulty, 1, IBV_WC_SUCCESS);
	expect_completion(&faulty, 2, IBV_WC_REM_ACCESS_ERR);
	expect_completion(&faulty, 3, IBV_WC_WR_FLUSH_ERR);
	expect_event(&plain, IBV_EVENT_QP_ACCESS_ERR);
	destroy_both();
	create_both("crc,op=write,nth=2", 7);
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 1));
	expect_completion(&faulty, 1, IBV_WC_SUCCESS);
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 2));
	CHECK(next_completion(&faulty).status != IBV_WC_SUCCESS);
	expect_event(&plain, IBV_EVENT_QP_REQ_ERR);
	destroy_both();
	create_both("crc,op=recv,dir=in", 7);
	CODE(0, receive(&faulty, 1));
	CODE(0, receive(&faulty, 2));
	CODE(0, post(&plain, &faulty, IBV_WR_SEND, 1));
	expect_completion(&faulty, 1, IBV_WC_SUCCESS);
	CODE(0, post(&plain, &faulty, IBV_WR_SEND, 2));
	expect_completion(&faulty, 2, IBV_WC_WR_FLUSH_ERR);
	expect_event(&faulty, IBV_EVENT_QP_REQ_ERR);
	destroy_both();
}

static void test_receiver_not_ready(void)
{
	double begin;

	/* A sender without retries fails immediately. */
	create_both("rnr", 0);
	CODE(0, receive(&faulty, 1));
	CODE(0, post(&plain, &faulty, IBV_WR_SEND, 1));
	expect_completion(&plain, 1, IBV_WC_RNR_RETRY_EXC_ERR);
	expect_completion(&faulty, 1, IBV_WC_WR_FLUSH_ERR);
	destroy_both();
	/* A sender with unlimited retries waits. */
	create_both("rnr=200ms", 7);
	CODE(0, receive(&faulty, 1));
	begin = now();
	CODE(0, post(&plain, &faulty, IBV_WR_SEND, 1));
	expect_completion(&faulty, 1, IBV_WC_SUCCESS);
	CHECK(now() - begin >= 0.2);
	expect_completion(&plain, 1, IBV_WC_SUCCESS);
	destroy_both();
}

/* Delayed requests complete late, but do complete. */
static void test_delays(void)
{
	static const struct {
		const char *faults;
		double min_s;
	} all[] = { { "delay=100ms,op=write,nth=2", 0.1 }, { "stall=200ms,op=write,nth=2", 0.2 },
		{ "slow=8K", 0.05 }, { "port-down=200ms,op=write,nth=2", 0.2 } };
	double begin;
	size_t i;

	for (i = 0; i < 4; i++) {
		create_both(all[i].faults, 7);
		begin = now();
		for (int id = 1; id < 10; id++) {
			CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, id));
			expect_completion(&faulty, id, IBV_WC_SUCCESS);
		}
		if (now() - begin < all[i].min_s)
			fprintf(stderr, "%s: %g s\n", all[i].faults, now() - begin);
		CHECK(now() - begin >= all[i].min_s);
		destroy_both();
	}
	/* The end sends and receives nothing until its port is active again. */
	create_both("port-down=300ms,op=write,nth=2", 7);
	CODE(IBV_PORT_ACTIVE, port_state(&faulty));
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 1));
	expect_completion(&faulty, 1, IBV_WC_SUCCESS);
	begin = now();
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 2));
	expect_event(&faulty, IBV_EVENT_PORT_ERR);
	if (now() - begin < 0.2)
		CODE(IBV_PORT_DOWN, port_state(&faulty));
	CODE(IBV_PORT_ACTIVE, port_state(&plain));
	expect_event(&faulty, IBV_EVENT_PORT_ACTIVE);
	CHECK(now() - begin >= 0.3);
	CODE(IBV_PORT_ACTIVE, port_state(&faulty));
	expect_completion(&faulty, 2, IBV_WC_SUCCESS);
	destroy_both();
	/* A fault that depends only on time. */
	create_end(&faulty, "event=PORT_ERR,time=20ms");
	expect_event(&faulty, IBV_EVENT_PORT_ERR);
	destroy_end(&faulty);
}

/* Returns the number of the first request that fails, or 400 if none fails. */
static int first_failed_request(const char *faults)
{
	int id;

	create_both(faults, 7);
	for (id = 1; id < 400; id++) {
		NEED(post(&faulty, &plain, IBV_WR_RDMA_WRITE, id) == 0);
		if (next_completion(&faulty).status != IBV_WC_SUCCESS)
			break;
	}
	destroy_both();
	return id;
}

static void test_same_seed_repeats_faults(void)
{
	int first = first_failed_request("status=GENERAL_ERR,p=3%");

	CHECK(first < 400);
	CODE(first, first_failed_request("status=GENERAL_ERR,p=3%"));
	first = first_failed_request("status=GENERAL_ERR,nth=1..390");
	CODE(first, first_failed_request("status=GENERAL_ERR,nth=1..390"));
}

/* The log names the fault, the queue pair, the request and the seed. Rules for another queue pair
 * or peer have no effect. */
static void test_log(void)
{
	char name[] = "/tmp/iwarp-faults-XXXXXX", faults[160], want[160], text[1024];
	int fd = mkstemp(name);
	ssize_t n;

	NEED(fd >= 0);
	snprintf(faults, sizeof(faults),
		"status=FATAL_ERR,qp=2;status=GENERAL_ERR,qp=1,peer=127.0.0.1/8,op=write,nth=2;"
		"reset,peer=192.0.2.1;log=%s", name);
	create_both(faults, 7);
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_READ, 1));
	expect_completion(&faulty, 1, IBV_WC_SUCCESS);
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 2));
	expect_completion(&faulty, 2, IBV_WC_SUCCESS);
	CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, 3));
	expect_completion(&faulty, 3, IBV_WC_GENERAL_ERR);
	n = read(fd, text, sizeof(text) - 1);
	NEED(n > 0);
	text[n] = 0;
	snprintf(want, sizeof(want), " seed=7 rule=2 status=GENERAL_ERR qp=1 num=0x%06x peer=127.0.0.1:",
		faulty.qp->qp_num);
	CHECK(strstr(text, want) != NULL);
	CHECK(strstr(text, " op=write n=2\n") != NULL);
	CHECK(strstr(text, "rule=1") == NULL && strstr(text, "rule=3") == NULL);
	destroy_both();
	/* A fault after a number of bytes takes effect at exactly this byte, even within a message. */
	snprintf(faults, sizeof(faults), "reset,bytes=777;log=%s", name);
	create_both(faults, 7);
	for (int id = 1; id < 20; id++)
		CODE(0, post(&faulty, &plain, IBV_WR_RDMA_WRITE, id));
	while (next_completion(&faulty).status == IBV_WC_SUCCESS)
		;
	n = read(fd, text, sizeof(text) - 1);
	NEED(n > 0);
	text[n] = 0;
	CHECK(strstr(text, " reset qp=1 ") && strstr(text, " bytes=777\n"));
	close(fd);
	unlink(name);
	destroy_both();
}

int main(void)
{
	test_statuses();
	test_full_queues();
	test_object_creation();
	test_events();
	test_lost_connections();
	test_cq_overflow();
	test_remote_errors();
	test_receiver_not_ready();
	test_delays();
	test_same_seed_repeats_faults();
	test_log();
	return result();
}
