/* Tests of a peer process that is killed, while idle or in the middle of a message. The queue pairs
 * are connected by queue pair number. The queue pair stays in RTS until its oldest request times
 * out, and there is no asynchronous event for the lost peer. */
#include "check.h"

#include <fcntl.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SIZE = 16 << 20, RECEIVES = 3, BEGUN = 4 << 20 };

struct name {
	union ibv_gid gid;
	uint32_t num;
};

struct end {
	struct ibv_context *context;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char *memory;
};

static void write_all(int to, const void *what, size_t len)
{
	NEED(write(to, what, len) == (ssize_t)len);
}

static void read_all(int from, void *what, size_t len)
{
	NEED(read(from, what, len) == (ssize_t)len);
}

static void create_end(struct end *e, int shared)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 0 } };
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_pd *pd;

	NEED(list && list[0]);
	NEED(e->context = ibv_open_device(list[0]));
	ibv_free_device_list(list);
	NEED(!fcntl(e->context->async_fd, F_SETFL, O_NONBLOCK));
	NEED(pd = ibv_alloc_pd(e->context));
	NEED(e->cq = ibv_create_cq(e->context, 64, NULL, NULL, 0));
	if (shared)
		NEED(e->srq = ibv_create_srq(pd, &srq));
	attr.send_cq = attr.recv_cq = e->cq;
	attr.srq = e->srq;
	NEED(e->qp = ibv_create_qp(pd, &attr));
	NEED(e->memory = calloc(1, SIZE));
	NEED(e->mr = ibv_reg_mr(pd, e->memory, SIZE, IBV_ACCESS_LOCAL_WRITE));
}

static void connect_to_peer(struct end *e, int from, int to)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct name own = { .num = e->qp->qp_num }, peer;

	NEED(!ibv_query_gid(e->context, 1, 0, &own.gid));
	write_all(to, &own, sizeof(own));
	read_all(from, &peer, sizeof(peer));
	NEED(!ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer.num,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = peer.gid, .hop_limit = 1 } } };
	NEED(!ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
		IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
		.max_rd_atomic = 1 };
	NEED(!ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
		IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
		IBV_QP_MAX_QP_RD_ATOMIC));
}

static void post(struct end *e, uint64_t id, uint32_t len)
{
	struct ibv_sge sge = { (uintptr_t)e->memory, len, e->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED }, *bad;

	CODE(0, ibv_post_send(e->qp, &wr, &bad));
}

static void receive(struct end *e, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)e->memory, SIZE, e->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	CODE(0, e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad));
}

static int state(struct end *e)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	CODE(0, ibv_query_qp(e->qp, &attr, IBV_QP_STATE, &init));
	return attr.qp_state;
}

static void expect_completion(struct end *e, uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc;
	int i, n = 0;

	for (i = 0; !n && i < 20000; i++) {
		n = ibv_poll_cq(e->cq, 1, &wc);
		if (!n)
			usleep(1000);
	}
	NEED(n == 1);
	CHECK(wc.wr_id == id);
	CODE(status, wc.status);
}

/* The peer process. It sends one message if `sends` is set, and waits to be killed. */
static void run_peer(int from, int to, int sends)
{
	struct end e = { 0 };
	char go;

	/* The fault stops the message in the middle, also on a fast machine. */
	setenv("IWARP_FAULT", "seed=1;log=/dev/null;stall,bytes=8M", 1);
	create_end(&e, 0);
	memset(e.memory, 1, SIZE);
	connect_to_peer(&e, from, to);
	read_all(from, &go, 1);
	if (sends)
		post(&e, 1, SIZE);
	for (;;)
		pause();
}

/* Starts the peer. If `sends` is set, kills it when BEGUN bytes of its message have arrived.
 * `shared` selects a shared receive queue. `early` posts a request before the peer is killed. */
static void test_peer_dies(int sends, int shared, int early)
{
	struct ibv_async_event event;
	struct end e = { 0 };
	int to_child[2], to_parent[2];
	struct ibv_wc wc;
	pid_t child;
	int i;

	NEED(!pipe(to_child) && !pipe(to_parent));
	NEED((child = fork()) >= 0);
	if (!child)
		run_peer(to_child[0], to_parent[1], sends);
	create_end(&e, shared);
	connect_to_peer(&e, to_parent[0], to_child[1]);
	for (i = 0; i < RECEIVES; i++)
		receive(&e, 100 + i);
	write_all(to_child[1], "!", 1);
	for (i = 0; sends && !*(volatile char *)(e.memory + BEGUN); i++) {
		NEED(i < 20000);
		usleep(1000);
	}
	if (early)
		post(&e, 1, 8);
	NEED(!kill(child, SIGKILL));
	NEED(waitpid(child, NULL, 0) == child);
	if (!early) {
		usleep(300000);
		CODE(IBV_QPS_RTS, state(&e));
		CODE(0, ibv_poll_cq(e.cq, 1, &wc));
		post(&e, 1, 8);
	}
	post(&e, 2, 8);
	/* The receive of the incomplete message completes first. */
	if (sends)
		expect_completion(&e, 100, IBV_WC_WR_FLUSH_ERR);
	expect_completion(&e, 1, IBV_WC_RETRY_EXC_ERR);
	expect_completion(&e, 2, IBV_WC_WR_FLUSH_ERR);
	for (i = sends; !shared && i < RECEIVES; i++)
		expect_completion(&e, 100 + i, IBV_WC_WR_FLUSH_ERR);
	CODE(IBV_QPS_ERR, state(&e));
	CODE(0, ibv_poll_cq(e.cq, 1, &wc));
	while (!ibv_get_async_event(e.context, &event)) {
		CHECK(event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED ||
			event.event_type == IBV_EVENT_COMM_EST);
		ibv_ack_async_event(&event);
	}
	CODE(0, ibv_destroy_qp(e.qp));
	for (i = 0; i < 2; i++) {
		close(to_child[i]);
		close(to_parent[i]);
	}
}

int main(void)
{
	int sends, shared, early;

	for (sends = 0; sends < 2; sends++)
		for (shared = 0; shared < 2; shared++)
			for (early = 0; early < 2; early++)
				test_peer_dies(sends, shared, early);
	return result();
}
