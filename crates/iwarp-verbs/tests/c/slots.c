/* Slots of send and receive queues become free when the completion of their request, or of a later
 * one, is polled. Not earlier, so that a completion queue as large as its queues cannot overflow;
 * and not later. */
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

static struct ibv_qp *new_qp(struct ibv_cq *send_cq, struct ibv_cq *recv_cq)
{
	struct ibv_qp_init_attr attr = { .send_cq = send_cq, .recv_cq = recv_cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	NEED(qp);
	CODE(DEPTH, attr.cap.max_send_wr);
	CODE(DEPTH, attr.cap.max_recv_wr);
	return qp;
}

/* With completion queues exactly as large as the queues. */
static struct end make(void)
{
	struct end e = { ibv_create_cq(context, DEPTH, NULL, NULL, 0),
		ibv_create_cq(context, DEPTH, NULL, NULL, 0), NULL };

	NEED(e.send_cq && e.recv_cq);
	e.qp = new_qp(e.send_cq, e.recv_cq);
	return e;
}

static void unmake(struct end *e)
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

/* Posts signaled Writes until the queue is full. Returns how many were accepted. */
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

/* Gives the queue pairs time to write completions, and tries to post in between. */
static void stays_full(struct ibv_qp *qp, int (*fill)(struct ibv_qp *))
{
	int i;

	for (i = 0; i < 20; i++) {
		usleep(2000);
		CODE(0, fill(qp));
	}
}

static void sends(void)
{
	struct end a = make(), b = make();
	int i;

	connect_both(a.qp, b.qp);
	CODE(DEPTH, fill_sends(a.qp));
	stays_full(a.qp, fill_sends);
	for (i = 0; i < 3 * DEPTH; i++) {
		int n = i % 3 + 1;

		take(a.send_cq, n, IBV_WC_SUCCESS);
		CODE(n, fill_sends(a.qp));
	}
	take(a.send_cq, DEPTH, IBV_WC_SUCCESS);
	CODE(DEPTH, fill_sends(a.qp));
	unmake(&a);
	unmake(&b);
}

/* The completion of a signaled request frees the slots of the unsignaled ones before it. */
static void unsignaled_sends(void)
{
	struct end a = make(), b = make();
	int round, i;

	connect_both(a.qp, b.qp);
	for (round = 0; round < 8; round++) {
		for (i = 0; i < DEPTH - 2; i++)
			CODE(0, send_one(a.qp, i % 2 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, 0));
		CODE(0, send_one(a.qp, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED));
		CODE(0, send_one(a.qp, IBV_WR_RDMA_WRITE, 0));
		stays_full(a.qp, fill_sends);
		take(a.send_cq, 1, IBV_WC_SUCCESS);
		/* The last one has not completed. */
		CODE(DEPTH - 1, fill_sends(a.qp));
		take(a.send_cq, DEPTH - 1, IBV_WC_SUCCESS);
	}
	/* Unsignaled requests alone free nothing, as with hardware. */
	for (i = 0; i < DEPTH; i++)
		CODE(0, send_one(a.qp, IBV_WR_RDMA_WRITE, 0));
	stays_full(a.qp, fill_sends);
	unmake(&a);
	unmake(&b);
}

static void receives(void)
{
	struct end a = make(), b = make();
	int i;

	connect_both(a.qp, b.qp);
	CODE(DEPTH, fill_receives(b.qp));
	for (i = 0; i < DEPTH; i++)
		CODE(0, send_one(a.qp, IBV_WR_SEND, IBV_SEND_SIGNALED));
	take(a.send_cq, DEPTH, IBV_WC_SUCCESS);
	stays_full(b.qp, fill_receives);
	for (i = 1; i < 4; i++) {
		take(b.recv_cq, i, IBV_WC_SUCCESS);
		CODE(i, fill_receives(b.qp));
	}
	take(b.recv_cq, DEPTH - 6, IBV_WC_SUCCESS);
	CODE(DEPTH - 6, fill_receives(b.qp));
	unmake(&a);
	unmake(&b);
}

/* A list takes all free slots, although one was taken before. */
static void lists_of_receives(void)
{
	struct ibv_recv_wr third = { 0 }, second = { .next = &third }, list = { .next = &second }, *bad;
	struct end a = make(), b = make();
	int i;

	connect_both(a.qp, b.qp);
	CODE(DEPTH, fill_receives(b.qp));
	for (i = 0; i < 5; i++)
		CODE(0, send_one(a.qp, IBV_WR_SEND, IBV_SEND_SIGNALED));
	take(b.recv_cq, 2, IBV_WC_SUCCESS);
	CODE(0, receive_one(b.qp));
	take(b.recv_cq, 2, IBV_WC_SUCCESS);
	CODE(0, ibv_post_recv(b.qp, &list, &bad));
	take(b.recv_cq, 1, IBV_WC_SUCCESS);
	CODE(ENOMEM, ibv_post_recv(b.qp, &list, &bad));
	CHECK(bad == &second);
	unmake(&a);
	unmake(&b);
}

/* In ERR, requests complete immediately but occupy slots until they are polled. */
static void flushed(void)
{
	struct end a = make(), b = make();

	connect_both(a.qp, b.qp);
	CODE(0, send_one(a.qp, IBV_WR_RDMA_WRITE, 0));
	CODE(0, move_to(a.qp, IBV_QPS_ERR, 0, IBV_QP_STATE));
	while (ibv_poll_cq(a.send_cq, 1, &(struct ibv_wc){ 0 }) > 0)
		;
	CHECK(fill_sends(a.qp) >= DEPTH - 1);
	CODE(DEPTH, fill_receives(a.qp));
	stays_full(a.qp, fill_sends);
	stays_full(a.qp, fill_receives);
	take(a.send_cq, 3, IBV_WC_WR_FLUSH_ERR);
	CHECK(fill_sends(a.qp) >= 3);
	take(a.recv_cq, 3, IBV_WC_WR_FLUSH_ERR);
	CODE(3, fill_receives(a.qp));
	unmake(&a);
	unmake(&b);
}

/* RESET frees all slots and discards unpolled completions. */
static void reset(void)
{
	struct end a = make(), b = make();
	struct ibv_wc wc;
	int round, i;

	for (round = 0; round < 4; round++) {
		connect_both(a.qp, b.qp);
		CODE(DEPTH, fill_sends(a.qp));
		CODE(DEPTH, fill_receives(a.qp));
		take(a.send_cq, round, IBV_WC_SUCCESS);
		CODE(round, fill_sends(a.qp));
		take(a.send_cq, round, IBV_WC_SUCCESS);
		/* Completions polled before an earlier RESET free no receives. */
		for (i = 0; i < DEPTH; i++)
			CODE(0, send_one(b.qp, IBV_WR_SEND, IBV_SEND_SIGNALED));
		take(b.send_cq, DEPTH, IBV_WC_SUCCESS);
		stays_full(a.qp, fill_receives);
		take(a.recv_cq, round + 1, IBV_WC_SUCCESS);
		CODE(round + 1, fill_receives(a.qp));
		CODE(0, move_to(a.qp, IBV_QPS_RESET, 0, IBV_QP_STATE));
		CODE(0, move_to(b.qp, IBV_QPS_RESET, 0, IBV_QP_STATE));
		CODE(0, ibv_poll_cq(a.send_cq, 1, &wc));
		CODE(0, ibv_poll_cq(a.recv_cq, 1, &wc));
	}
	unmake(&a);
	unmake(&b);
}

/* A queue pair has its own slots, although it shares its completion queues, and reuses the place of
 * a destroyed one. */
static void shared_queues(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 8 * DEPTH, NULL, NULL, 0);
	struct ibv_qp *qps[3];
	int i, round;

	NEED(cq);
	for (i = 0; i < 3; i++)
		qps[i] = new_qp(cq, cq);
	connect_both(qps[0], qps[1]);
	for (round = 0; round < 4; round++) {
		CODE(0, move_to(qps[2], IBV_QPS_INIT, 0, TO_INIT));
		CODE(0, move_to(qps[2], IBV_QPS_ERR, 0, IBV_QP_STATE));
		CODE(DEPTH, fill_receives(qps[2]));
		CODE(DEPTH, fill_sends(qps[0]));
		if (round % 2) {
			CODE(0, ibv_resize_cq(cq, (8 + round) * DEPTH));
			take(cq, DEPTH, IBV_WC_WR_FLUSH_ERR);
			CODE(DEPTH, fill_receives(qps[2]));
		}
		stays_full(qps[0], fill_sends);
		CODE(0, ibv_destroy_qp(qps[2]));
		qps[2] = new_qp(cq, cq);
		take(cq, DEPTH, IBV_WC_SUCCESS);
	}
	for (i = 0; i < 3; i++)
		CODE(0, ibv_destroy_qp(qps[i]));
	CODE(0, ibv_destroy_cq(cq));
}

static _Atomic int stop;

static void *poll_always(void *cq)
{
	struct ibv_wc wc[4];
	intptr_t sum = 0;

	while (!stop)
		sum += ibv_poll_cq(cq, 4, wc);
	return (void *)sum;
}

static void polled_by_another_thread(void)
{
	struct end a = make(), b = make();
	time_t end = time(NULL) + 20;
	pthread_t thread;
	void *polled;
	int posted = 0;

	connect_both(a.qp, b.qp);
	NEED(pthread_create(&thread, NULL, poll_always, a.send_cq) == 0);
	while (posted < 20 * DEPTH) {
		NEED(time(NULL) < end);
		posted += send_one(a.qp, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED) == 0;
	}
	stop = 1;
	NEED(pthread_join(thread, &polled) == 0);
	take(a.send_cq, posted - (int)(intptr_t)polled, IBV_WC_SUCCESS);
	CODE(DEPTH, fill_sends(a.qp));
	unmake(&a);
	unmake(&b);
}

/* The extended interface frees a slot with each completion that it returns. */
static void extended_polling(void)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = DEPTH, .wc_flags = IBV_WC_EX_WITH_BYTE_LEN };
	struct ibv_cq_ex *ex = ibv_create_cq_ex(context, &attr);
	struct ibv_poll_cq_attr none = { 0 };
	struct end b = make();
	struct ibv_qp *a;
	time_t end = time(NULL) + 20;
	int left = 5;

	NEED(ex);
	a = new_qp(ibv_cq_ex_to_cq(ex), ibv_cq_ex_to_cq(ex));
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
	unmake(&b);
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

static void datagrams(void)
{
	struct end e = make();
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
	stays_full(ud, fill_datagrams);
	take(e.send_cq, 1, IBV_WC_SUCCESS);
	CODE(DEPTH, fill_datagrams(ud));
	take(e.send_cq, 3, IBV_WC_SUCCESS);
	CODE(3, fill_datagrams(ud));
	CODE(0, move_to(ud, IBV_QPS_ERR, 0, IBV_QP_STATE));
	CODE(DEPTH, fill_receives(ud));
	take(e.recv_cq, 4, IBV_WC_WR_FLUSH_ERR);
	CODE(4, fill_receives(ud));
	CODE(0, move_to(ud, IBV_QPS_RESET, 0, IBV_QP_STATE));
	NEED(ibv_modify_qp(ud, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
	CODE(DEPTH, fill_receives(ud));
	CODE(0, ibv_destroy_ah(ah));
	CODE(0, ibv_destroy_qp(ud));
	unmake(&e);
}

int main(void)
{
	context = open_first();
	pd = ibv_alloc_pd(context);
	NEED(pd);
	mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
		IBV_ACCESS_REMOTE_READ);
	NEED(mr);
	sends();
	unsignaled_sends();
	receives();
	lists_of_receives();
	flushed();
	reset();
	shared_queues();
	polled_by_another_thread();
	extended_polling();
	datagrams();
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
