/* Tests of the slots of send and receive queues. Polling the completion of a request, or of a later
 * one, frees the request's slot. An earlier moment would be wrong, because a completion queue as
 * large as its send and receive queues could overflow. */
#include <pthread.h>

#include "by_number.h"

enum { DEPTH = 16, MANY = 3 * DEPTH };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static char memory[4096];

struct end {
	struct ibv_cq *send_cq, *recv_cq;
	struct ibv_qp *qp;
};

static struct ibv_qp *create_qp(struct ibv_cq *send_cq, struct ibv_cq *recv_cq)
{
	struct ibv_qp_init_attr attr = { .send_cq = send_cq, .recv_cq = recv_cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	NEED(qp);
	CODE(DEPTH, attr.cap.max_send_wr);
	CODE(DEPTH, attr.cap.max_recv_wr);
	return qp;
}

/* Creates a queue pair whose completion queues are exactly as large as its queues. */
static struct end create_end(void)
{
	struct end e = { ibv_create_cq(context, DEPTH, NULL, NULL, 0),
		ibv_create_cq(context, DEPTH, NULL, NULL, 0), NULL };

	NEED(e.send_cq && e.recv_cq);
	e.qp = create_qp(e.send_cq, e.recv_cq);
	return e;
}

static void destroy_end(struct end *e)
{
	CODE(0, ibv_destroy_qp(e->qp));
	CODE(0, ibv_destroy_cq(e->send_cq));
	CODE(0, ibv_destroy_cq(e->recv_cq));
}

static int send_one(struct ibv_qp *qp, enum ibv_wr_opcode opcode, int flags)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = opcode != IBV_WR_SEND, .opcode = opcode,
		.send_flags = flags, .wr.rdma = { (uintptr_t)memory + 64, mr->rkey } }, *bad = NULL;
	int result = ibv_post_send(qp, &wr, &bad);

	CHECK(result ? bad == &wr : !bad);
	return result;
}

static int receive_one(struct ibv_qp *qp)
{
	struct ibv_recv_wr wr = { .num_sge = 0 }, *bad = NULL;
	int result = ibv_post_recv(qp, &wr, &bad);

	CHECK(result ? bad == &wr : !bad);
	return result;
}

/* Posts signaled Writes until the queue is full. Returns the number of accepted Writes. */
static int fill_sends(struct ibv_qp *qp)
{
	int n = 0, result;

	while ((result = send_one(qp, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED)) == 0 && n < MANY)
		n++;
	CODE(ENOMEM, result);
	return n;
}

static int fill_receives(struct ibv_qp *qp)
{
	int n = 0, result;

	while ((result = receive_one(qp)) == 0 && n < MANY)
		n++;
	CODE(ENOMEM, result);
	return n;
}

/* Checks repeatedly that the queue is full, while the queue pairs write completions. */
static void expect_still_full(struct ibv_qp *qp, int (*fill)(struct ibv_qp *))
{
	int i;

	for (i = 0; i < 20; i++) {
		usleep(2000);
		CODE(0, fill(qp));
	}
}

static void test_sends(void)
{
	struct end a = create_end(), b = create_end();
	int i;

	connect_both(a.qp, b.qp);
	CODE(DEPTH, fill_sends(a.qp));
	expect_still_full(a.qp, fill_sends);
	for (i = 0; i < 3 * DEPTH; i++) {
		int n = i % 3 + 1;

		expect_completions(a.send_cq, n, IBV_WC_SUCCESS);
		CODE(n, fill_sends(a.qp));
	}
	expect_completions(a.send_cq, DEPTH, IBV_WC_SUCCESS);
	CODE(DEPTH, fill_sends(a.qp));
	destroy_end(&a);
	destroy_end(&b);
}

/* Polling the completion of a signaled request also frees the slots of the unsignaled requests
 * before it. */
static void test_unsignaled_sends(void)
{
	struct end a = create_end(), b = create_end();
	int round, i;

	connect_both(a.qp, b.qp);
	for (round = 0; round < 8; round++) {
		for (i = 0; i < DEPTH - 2; i++)
			CODE(0, send_one(a.qp, i % 2 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, 0));
		CODE(0, send_one(a.qp, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED));
		CODE(0, send_one(a.qp, IBV_WR_RDMA_WRITE, 0));
		expect_still_full(a.qp, fill_sends);
		expect_completions(a.send_cq, 1, IBV_WC_SUCCESS);
		/* The last unsignaled Write still occupies its slot. */
		CODE(DEPTH - 1, fill_sends(a.qp));
		expect_completions(a.send_cq, DEPTH - 1, IBV_WC_SUCCESS);
	}
	/* Without a later signaled request, unsignaled requests keep their slots, as with hardware. */
	for (i = 0; i < DEPTH; i++)
		CODE(0, send_one(a.qp, IBV_WR_RDMA_WRITE, 0));
	expect_still_full(a.qp, fill_sends);
	destroy_end(&a);
	destroy_end(&b);
}

static void test_receives(void)
{
	struct end a = create_end(), b = create_end();
	int i;

	connect_both(a.qp, b.qp);
	CODE(DEPTH, fill_receives(b.qp));
	for (i = 0; i < DEPTH; i++)
		CODE(0, send_one(a.qp, IBV_WR_SEND, IBV_SEND_SIGNALED));
	expect_completions(a.send_cq, DEPTH, IBV_WC_SUCCESS);
	expect_still_full(b.qp, fill_receives);
	for (i = 1; i < 4; i++) {
		expect_completions(b.recv_cq, i, IBV_WC_SUCCESS);
		CODE(i, fill_receives(b.qp));
	}
	expect_completions(b.recv_cq, DEPTH - 6, IBV_WC_SUCCESS);
	CODE(DEPTH - 6, fill_receives(b.qp));
	destroy_end(&a);
	destroy_end(&b);
}

/* A list of receives uses all free slots, including those freed at different times. */
static void test_receive_lists(void)
{
	struct ibv_recv_wr third = { 0 }, second = { .next = &third }, list = { .next = &second }, *bad;
	struct end a = create_end(), b = create_end();
	int i;

	connect_both(a.qp, b.qp);
	CODE(DEPTH, fill_receives(b.qp));
	for (i = 0; i < 5; i++)
		CODE(0, send_one(a.qp, IBV_WR_SEND, IBV_SEND_SIGNALED));
	expect_completions(b.recv_cq, 2, IBV_WC_SUCCESS);
	CODE(0, receive_one(b.qp));
	expect_completions(b.recv_cq, 2, IBV_WC_SUCCESS);
	CODE(0, ibv_post_recv(b.qp, &list, &bad));
	expect_completions(b.recv_cq, 1, IBV_WC_SUCCESS);
	CODE(ENOMEM, ibv_post_recv(b.qp, &list, &bad));
	CHECK(bad == &second);
	destroy_end(&a);
	destroy_end(&b);
}

/* In the error state, requests complete immediately, but occupy slots until the program polls their
 * completions. */
static void test_flushed_requests(void)
{
	struct end a = create_end(), b = create_end();

	connect_both(a.qp, b.qp);
	CODE(0, send_one(a.qp, IBV_WR_RDMA_WRITE, 0));
	CODE(0, move_to(a.qp, IBV_QPS_ERR, 0, IBV_QP_STATE));
	while (ibv_poll_cq(a.send_cq, 1, &(struct ibv_wc){ 0 }) > 0)
		;
	CHECK(fill_sends(a.qp) >= DEPTH - 1);
	CODE(DEPTH, fill_receives(a.qp));
	expect_still_full(a.qp, fill_sends);
	expect_still_full(a.qp, fill_receives);
	expect_completions(a.send_cq, 3, IBV_WC_WR_FLUSH_ERR);
	CHECK(fill_sends(a.qp) >= 3);
	expect_completions(a.recv_cq, 3, IBV_WC_WR_FLUSH_ERR);
	CODE(3, fill_receives(a.qp));
	destroy_end(&a);
	destroy_end(&b);
}

/* RESET frees all slots and discards unpolled completions. */
static void test_reset(void)
{
	struct end a = create_end(), b = create_end();
	struct ibv_wc wc;
	int round, i;

	for (round = 0; round < 4; round++) {
		connect_both(a.qp, b.qp);
		CODE(DEPTH, fill_sends(a.qp));
		CODE(DEPTH, fill_receives(a.qp));
		expect_completions(a.send_cq, round, IBV_WC_SUCCESS);
		CODE(round, fill_sends(a.qp));
		expect_completions(a.send_cq, round, IBV_WC_SUCCESS);
		/* Completions that were polled before the last RESET do not free slots now. */
		for (i = 0; i < DEPTH; i++)
			CODE(0, send_one(b.qp, IBV_WR_SEND, IBV_SEND_SIGNALED));
		expect_completions(b.send_cq, DEPTH, IBV_WC_SUCCESS);
		expect_still_full(a.qp, fill_receives);
		expect_completions(a.recv_cq, round + 1, IBV_WC_SUCCESS);
		CODE(round + 1, fill_receives(a.qp));
		CODE(0, move_to(a.qp, IBV_QPS_RESET, 0, IBV_QP_STATE));
		CODE(0, move_to(b.qp, IBV_QPS_RESET, 0, IBV_QP_STATE));
		CODE(0, ibv_poll_cq(a.send_cq, 1, &wc));
		CODE(0, ibv_poll_cq(a.recv_cq, 1, &wc));
	}
	destroy_end(&a);
	destroy_end(&b);
}

/* Queue pairs that share a completion queue have separate slots, also after another queue pair of
 * it was destroyed. */
static void test_shared_completion_queue(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 8 * DEPTH, NULL, NULL, 0);
	struct ibv_qp *qps[3];
	int i, round;

	NEED(cq);
	for (i = 0; i < 3; i++)
		qps[i] = create_qp(cq, cq);
	connect_both(qps[0], qps[1]);
	for (round = 0; round < 4; round++) {
		CODE(0, move_to(qps[2], IBV_QPS_INIT, 0, TO_INIT));
		CODE(0, move_to(qps[2], IBV_QPS_ERR, 0, IBV_QP_STATE));
		CODE(DEPTH, fill_receives(qps[2]));
		CODE(DEPTH, fill_sends(qps[0]));
		if (round % 2) {
			CODE(0, ibv_resize_cq(cq, (8 + round) * DEPTH));
			expect_completions(cq, DEPTH, IBV_WC_WR_FLUSH_ERR);
			CODE(DEPTH, fill_receives(qps[2]));
		}
		expect_still_full(qps[0], fill_sends);
		CODE(0, ibv_destroy_qp(qps[2]));
		qps[2] = create_qp(cq, cq);
		expect_completions(cq, DEPTH, IBV_WC_SUCCESS);
	}
	for (i = 0; i < 3; i++)
		CODE(0, ibv_destroy_qp(qps[i]));
	CODE(0, ibv_destroy_cq(cq));
}

static _Atomic int stop;

static void *poll_until_stopped(void *cq)
{
	struct ibv_wc wc[4];
	intptr_t sum = 0;

	while (!stop)
		sum += ibv_poll_cq(cq, 4, wc);
	return (void *)sum;
}

static void test_polling_in_another_thread(void)
{
	struct end a = create_end(), b = create_end();
	time_t end = time(NULL) + 20;
	pthread_t thread;
	void *polled;
	int posted = 0;

	connect_both(a.qp, b.qp);
	NEED(pthread_create(&thread, NULL, poll_until_stopped, a.send_cq) == 0);
	while (posted < 20 * DEPTH) {
		NEED(time(NULL) < end);
		posted += send_one(a.qp, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED) == 0;
	}
	stop = 1;
	NEED(pthread_join(thread, &polled) == 0);
	expect_completions(a.send_cq, posted - (int)(intptr_t)polled, IBV_WC_SUCCESS);
	CODE(DEPTH, fill_sends(a.qp));
	destroy_end(&a);
	destroy_end(&b);
}

/* Each completion that the extended interface returns frees a slot. */
static void test_extended_polling(void)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = DEPTH, .wc_flags = IBV_WC_EX_WITH_BYTE_LEN };
	struct ibv_cq_ex *ex = ibv_create_cq_ex(context, &attr);
	struct ibv_poll_cq_attr none = { 0 };
	struct end b = create_end();
	struct ibv_qp *a;
	time_t end = time(NULL) + 20;
	int left = 5;

	NEED(ex);
	a = create_qp(ibv_cq_ex_to_cq(ex), ibv_cq_ex_to_cq(ex));
	connect_both(a, b.qp);
	CODE(DEPTH, fill_sends(a));
	while (left > 0) {
		NEED(time(NULL) < end);
		if (ibv_start_poll(ex, &none))
			continue;
		do
			left--;
		while (left > 0 && ibv_next_poll(ex) == 0);
		ibv_end_poll(ex);
	}
	CODE(5, fill_sends(a));
	CODE(0, ibv_destroy_qp(a));
	CODE(0, ibv_destroy_cq(ibv_cq_ex_to_cq(ex)));
	destroy_end(&b);
}

static struct ibv_ah *ah;

static int send_datagram(struct ibv_qp *qp, int flags)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .send_flags = flags,
		.wr.ud = { ah, qp->qp_num, 0x11 } }, *bad;

	return ibv_post_send(qp, &wr, &bad);
}

static int fill_datagrams(struct ibv_qp *qp)
{
	int n = 0;

	while (send_datagram(qp, IBV_SEND_SIGNALED) == 0 && n < MANY)
		n++;
	return n;
}

static void test_datagrams(void)
{
	struct end e = create_end();
	struct ibv_qp_init_attr attr = { .send_cq = e.send_cq, .recv_cq = e.recv_cq, .qp_type = IBV_QPT_UD,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp_attr to = attributes(context, IBV_QPS_INIT, 0);
	struct ibv_qp *ud = ibv_create_qp(pd, &attr);
	int i;

	NEED(ud);
	to.qkey = 0x11;
	ah = ibv_create_ah(pd, &to.ah_attr);
	NEED(ah && ibv_modify_qp(ud, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_QKEY) == 0);
	NEED(move_to(ud, IBV_QPS_RTR, 0, IBV_QP_STATE) == 0);
	NEED(move_to(ud, IBV_QPS_RTS, 0, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	for (i = 0; i < DEPTH - 1; i++)
		CODE(0, send_datagram(ud, 0));
	CODE(1, fill_datagrams(ud));
	expect_still_full(ud, fill_datagrams);
	expect_completions(e.send_cq, 1, IBV_WC_SUCCESS);
	CODE(DEPTH, fill_datagrams(ud));
	expect_completions(e.send_cq, 3, IBV_WC_SUCCESS);
	CODE(3, fill_datagrams(ud));
	CODE(0, move_to(ud, IBV_QPS_ERR, 0, IBV_QP_STATE));
	CODE(DEPTH, fill_receives(ud));
	expect_completions(e.recv_cq, 4, IBV_WC_WR_FLUSH_ERR);
	CODE(4, fill_receives(ud));
	CODE(0, move_to(ud, IBV_QPS_RESET, 0, IBV_QP_STATE));
	NEED(ibv_modify_qp(ud, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
	CODE(DEPTH, fill_receives(ud));
	CODE(0, ibv_destroy_ah(ah));
	CODE(0, ibv_destroy_qp(ud));
	destroy_end(&e);
}

int main(void)
{
	context = open_first();
	pd = ibv_alloc_pd(context);
	NEED(pd);
	mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
		IBV_ACCESS_REMOTE_READ);
	NEED(mr);
	test_sends();
	test_unsignaled_sends();
	test_receives();
	test_receive_lists();
	test_flushed_requests();
	test_reset();
	test_shared_completion_queue();
	test_polling_in_another_thread();
	test_extended_polling();
	test_datagrams();
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
