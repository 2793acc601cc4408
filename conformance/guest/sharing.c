/* Tests shared receive queues and asynchronous events of queue pairs.
 *
 * sharing ADDR PORT [impatient]
 *
 * Four queue pairs of this process share one receive queue, and each has a peer that sends. Exit
 * status: 0 if each message consumed one receive, the events arrived at the right time, and the
 * other queue pairs got the receives of a queue pair that ended. With `impatient`, the program
 * checks only that a Send without a receive ends its connection instead of waiting.
 */
#include "pair.h"

#define PAIRS 4
#define RECEIVES 32
#define LIMIT 8
#define OCTETS 64

static struct pair pairs[PAIRS];
static struct ibv_cq *sender_cq, *receiver_cq;
static struct ibv_srq *srq;
static struct ibv_mr *mr;
/* memory[0]: a send buffer for each pair; memory[1]: a buffer for each receive.
 */
static unsigned char memory[2][RECEIVES][OCTETS];

static void post_receives(unsigned from, unsigned count)
{
	for (unsigned i = from; i < from + count; i++) {
		struct ibv_sge sge = { (uintptr_t)memory[1][i % RECEIVES], OCTETS, mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;

		fail_if(ibv_post_srq_recv(srq, &wr, &bad), "a receive");
	}
}

static void send_message(unsigned pair, unsigned char what)
{
	struct ibv_sge sge = { (uintptr_t)memory[0][pair], OCTETS, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;

	memset(memory[0][pair], what, OCTETS);
	fail_if(ibv_post_send(pairs[pair].writer->qp, &wr, &bad), "a Send");
	while (!ibv_poll_cq(sender_cq, 1, &wc))
		;
	fail_if(wc.status != IBV_WC_SUCCESS, "the completion of a Send");
}

/* Waits for a message of one pair, and checks it. */
static void expect(unsigned pair, unsigned wr_id, unsigned char what)
{
	struct ibv_wc wc;
	int got = 0;

	for (int i = 0; i < 100000 && !(got = ibv_poll_cq(receiver_cq, 1, &wc)); i++)
		usleep(100);
	fail_if(!got || wc.status, "a message");
	fail_if(wc.wr_id != wr_id || wc.byte_len != OCTETS ||
		wc.qp_num != pairs[pair].target->qp->qp_num,
			"the wrong receive, length or queue pair");
	for (int i = 0; i < OCTETS; i++)
		fail_if(memory[1][wr_id % RECEIVES][i] != what, "the content of a message");
}

static int event_pending(void)
{
	struct pollfd ready = { srq->context->async_fd, POLLIN, 0 };

	return poll(&ready, 1, 0);
}

/* Reads asynchronous events until one has the type `wanted`. Events of queue pairs must belong to
 * `qp`. */
static void expect_event(enum ibv_event_type wanted, const struct ibv_qp *qp)
{
	struct ibv_async_event event;
	struct pollfd ready = { srq->context->async_fd, POLLIN, 0 };

	do {
		fail_if(poll(&ready, 1, 10000) != 1 || ibv_get_async_event(srq->context, &event),
			ibv_event_type_str(wanted));
		printf("event: %s\n", ibv_event_type_str(event.event_type));
		fail_if(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED ?
				event.element.srq != srq :
				qp && event.element.qp != qp,
			"the event is for another object");
		ibv_ack_async_event(&event);
	} while (event.event_type != wanted);
}

static void connect_pairs(struct sockaddr_in address)
{
	for (unsigned i = 0; i < PAIRS; i++) {
		struct ibv_qp_init_attr ours = { .qp_type = IBV_QPT_RC, .cap = { 4, 1, 1, 1, 0 } },
			theirs = ours;

		pairs[i] = begin_pair(&address);
		if (!i) {
			struct ibv_srq_init_attr attr = { .attr = { .max_wr = RECEIVES,
					.max_sge = 1 } };
			struct rdma_cm_id *id = pairs[i].writer;

			sender_cq = ibv_create_cq(id->verbs, 16, NULL, NULL, 0);
			receiver_cq = ibv_create_cq(id->verbs, 2 * RECEIVES, NULL, NULL, 0);
			srq = ibv_create_srq(id->pd, &attr);
			mr = ibv_reg_mr(id->pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
			fail_if(!sender_cq || !receiver_cq || !srq || !mr,
				"a shared receive queue");
			fail_if(attr.attr.max_wr < RECEIVES,
				"the shared receive queue is smaller than requested");
		}
		ours.send_cq = ours.recv_cq = sender_cq;
		theirs.send_cq = theirs.recv_cq = receiver_cq;
		theirs.srq = srq;
		join_pair(&pairs[i], ours, theirs);
		address.sin_port = htons(ntohs(address.sin_port) + 1);
	}
}

static void set_limit(void)
{
	struct ibv_srq_attr attr = { .srq_limit = LIMIT, .max_wr = RECEIVES };

	fail_if(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT), "setting the limit");
	fail_if(!ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR), "the size was changed");
	attr.srq_limit = 100000;
	fail_if(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT), "a limit beyond the size was accepted");
}

/* Sends a message over each pair. The event must arrive with the first message that leaves fewer
 * receives than the limit, and only then. */
static void test_limit_event(void)
{
	post_receives(0, RECEIVES);
	set_limit();
	for (unsigned i = 0; i < RECEIVES; i++) {
		send_message(i % PAIRS, (unsigned char)(i + 1));
		expect(i % PAIRS, i, (unsigned char)(i + 1));
		if (i < RECEIVES - LIMIT)
			fail_if(event_pending(), "the limit event arrived too early");
		else if (i == RECEIVES - LIMIT)
			expect_event(IBV_EVENT_SRQ_LIMIT_REACHED, NULL);
		else
			fail_if(event_pending(), "the limit event arrived twice");
	}
	printf("passed: receives are shared, and the limit is reported\n");
}

/* A message without a receive waits until a receive is posted. */
static void test_send_waits(void)
{
	send_message(1, 77);
	usleep(200000);
	post_receives(RECEIVES, 1);
	expect(1, RECEIVES, 77);
	printf("passed: a Send waits for a receive\n");
}

static void test_send_without_receive(void)
{
	struct ibv_sge sge = { (uintptr_t)memory[0], OCTETS, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr = {};

	fail_if(ibv_post_send(pairs[1].writer->qp, &wr, &bad), "a Send");
	for (int i = 0; i < 100 && attr.qp_state != IBV_QPS_ERR; i++) {
		usleep(10000);
		fail_if(ibv_query_qp(pairs[1].target->qp, &attr, IBV_QP_STATE, &init), "the state");
	}
	fail_if(attr.qp_state != IBV_QPS_ERR,
		"a Send without a receive did not end its connection");
	printf("passed: a Send that finds no receive ends its connection\n");
}

/* The receives of a queue pair in error go to the other queue pairs. */
static void test_queue_pair_error(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_wc wc;

	post_receives(RECEIVES + 1, 2);
	fail_if(ibv_modify_qp(pairs[0].target->qp, &attr, IBV_QP_STATE), "the error state");
	expect_event(IBV_EVENT_QP_LAST_WQE_REACHED, pairs[0].target->qp);
	usleep(100000);
	fail_if(ibv_poll_cq(receiver_cq, 1, &wc), "a shared receive was flushed");
	send_message(2, 99);
	expect(2, RECEIVES + 1, 99);
	printf("passed: the other queue pairs get the receives of one that ended\n");
}

/* Writes to an unknown STag. */
static void test_access_error(void)
{
	struct ibv_sge sge = { (uintptr_t)memory[0][3], OCTETS, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE },
		*bad;

	wr.wr.rdma.remote_addr = (uintptr_t)memory;
	wr.wr.rdma.rkey = mr->rkey + 1;
	fail_if(ibv_post_send(pairs[3].writer->qp, &wr, &bad), "a Write");
	expect_event(IBV_EVENT_QP_ACCESS_ERR, pairs[3].target->qp);
	printf("passed: a refused access is reported\n");
}

static void destroy_all(void)
{
	fail_if(!ibv_destroy_srq(srq), "a shared receive queue in use was destroyed");
	while (event_pending()) {
		struct ibv_async_event event;

		fail_if(ibv_get_async_event(srq->context, &event), "an event");
		ibv_ack_async_event(&event);
	}
	for (unsigned i = 0; i < PAIRS; i++)
		destroy_queue_pairs(&pairs[i]);
	fail_if(ibv_destroy_srq(srq), "destroying the shared receive queue");
	fail_if(ibv_destroy_cq(sender_cq) || ibv_destroy_cq(receiver_cq) || ibv_dereg_mr(mr),
		"destroying the other objects");
	for (unsigned i = 0; i < PAIRS; i++)
		destroy_pair(&pairs[i]);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 3 && argc != 4)
		return 2;
	address.sin_port = htons((unsigned short)atoi(argv[2]));
	fail_if(inet_pton(AF_INET, argv[1], &address.sin_addr) != 1, "the address");
	connect_pairs(address);
	while (event_pending())
		expect_event(IBV_EVENT_COMM_EST, NULL);
	if (argc == 4) {
		test_send_without_receive();
	} else {
		test_limit_event();
		test_send_waits();
		test_queue_pair_error();
		test_access_error();
	}
	destroy_all();
	return 0;
}
