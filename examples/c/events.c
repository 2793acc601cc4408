/* Lesson 6: two ways to wait for a completion. The server takes 10 ms for each answer. The client
 * prints how much processor time it has used until the answers came.
 *
 * usage: events             answers one client on port 7471
 *        events HOST poll   asks 100 times, and polls for the answers
 *        events HOST wait   asks 100 times, and sleeps until an answer comes */
#include "lesson.h"
#include <time.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#define PORT "7471"
#define QUESTIONS 100

static double seconds(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

/* Sleeps until the queue has a completion, and returns it. */
static struct ibv_wc wait_for_completion(struct ibv_cq *cq, struct ibv_comp_channel *channel)
{
	struct ibv_wc wc;
	struct ibv_cq *notified;
	void *context;
	int count;

	while ((count = ibv_poll_cq(cq, 1, &wc)) == 0) {
		check(ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
		/* A completion that came before the request causes no event, so poll again. */
		count = ibv_poll_cq(cq, 1, &wc);
		if (count != 0)
			break;
		check(ibv_get_cq_event(channel, &notified, &context), "ibv_get_cq_event");
		ibv_ack_cq_events(notified, 1);
	}
	succeeded(count, &wc);
	return wc;
}

static struct rdma_cm_id *endpoint(const char *host)
{
	struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP,
				      .ai_flags = host ? 0 : RAI_PASSIVE}, *address;
	struct ibv_qp_init_attr queues = {
		.sq_sig_all = 1,
		.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
	};
	struct rdma_cm_id *id;

	check(rdma_getaddrinfo(host, PORT, &hints, &address), "rdma_getaddrinfo");
	check(rdma_create_ep(&id, address, NULL, &queues), "rdma_create_ep");
	rdma_freeaddrinfo(address);
	return id;
}

/* Sends a message without data. */
static void send_empty(struct rdma_cm_id *id)
{
	check(rdma_post_sendv(id, NULL, NULL, 0, 0), "rdma_post_sendv");
	completion(id->send_cq);
}

static void receive_empty(struct rdma_cm_id *id)
{
	check(rdma_post_recvv(id, NULL, NULL, 0), "rdma_post_recvv");
}

static void serve(struct rdma_cm_id *listener)
{
	struct timespec pause = {.tv_nsec = 10000000};
	struct rdma_conn_param param = {0};
	struct rdma_cm_id *id;

	check(rdma_listen(listener, 1), "rdma_listen");
	check(rdma_get_request(listener, &id), "rdma_get_request");
	receive_empty(id);
	check(rdma_accept(id, &param), "rdma_accept");
	for (int i = 0; i < QUESTIONS; i++) {
		wait_for_completion(id->recv_cq, id->recv_cq_channel);
		receive_empty(id);
		nanosleep(&pause, NULL);
		send_empty(id);
	}
	rdma_destroy_ep(id);
}

static void ask(struct rdma_cm_id *id, int sleeps)
{
	struct rdma_conn_param param = {0};

	check(rdma_connect(id, &param), "rdma_connect");
	double start = seconds(CLOCK_MONOTONIC), used = seconds(CLOCK_PROCESS_CPUTIME_ID);
	for (int i = 0; i < QUESTIONS; i++) {
		receive_empty(id);
		send_empty(id);
		if (sleeps)
			wait_for_completion(id->recv_cq, id->recv_cq_channel);
		else
			completion(id->recv_cq);
	}
	printf("%d answers in %.2f s; used the processor for %.2f s\n", QUESTIONS,
	       seconds(CLOCK_MONOTONIC) - start, seconds(CLOCK_PROCESS_CPUTIME_ID) - used);
	rdma_disconnect(id);
}

int main(int argc, char **argv)
{
	struct rdma_cm_id *id = endpoint(argc > 1 ? argv[1] : NULL);

	if (argc > 1)
		ask(id, argc > 2 && strcmp(argv[2], "wait") == 0);
	else
		serve(id);
	rdma_destroy_ep(id);
	return 0;
}
