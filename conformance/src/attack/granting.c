/* A verbs server that grants memory to every client, and a client that uses it correctly. `cargo
 * xtask interop hostile` attacks the server while the client runs.
 *
 * granting serve ADDR PORT [plain]
 *
 * granting measure ADDR PORT ROUNDS [plain]
 *
 * Each client gets its own memory: a region with all remote rights, a region with none, a region in
 * another protection domain, and a type 2 window for Reads of the second and third page of the
 * first region. The private data of the reply describe the first region and contain the keys
 * (big-endian: address, length, four keys). The server binds the window when the connection is
 * established. It then sets the word before the last word of the first region to a nonzero value.
 * On the message "Leave", the server destroys the queue pair at once, even if operations are in
 * flight. At the end of a connection, the server checks memory that no client may change: the
 * octets around the first region, the other two regions, and the last word of the first region, to
 * which only attacks after a Terminate write. If any has changed, it exits with status 3.
 *
 * In each round, the client posts a Write, a Read of the same memory, a FetchAdd and a Send. It
 * checks that the Read returns the written data and the FetchAdd the number of the round. At the
 * end it prints the median and the 99th percentile of the duration of a round, in microseconds.
 *
 * Use `plain` for devices that do not support memory windows and atomics: the server then has no
 * window, and a round no FetchAdd.
 */
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <rdma/rdma_cma.h>

#define REGION 524288
#define GUARD 4096
#define MEMORY (5 * GUARD + REGION)
#define RECEIVES 16
#define MESSAGE 64
#define READS 16
#define TIMEOUT_MS 20000
#define BIND_WR_ID RECEIVES /* wr_id of the request that binds the window */
#define RIGHTS                                                                \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | \
	 IBV_ACCESS_REMOTE_ATOMIC)

struct grant {
	uint64_t address;
	uint32_t length, all, local, foreign, window;
} __attribute__((packed));

static int plain;

static void fail_if(int failed, const char *what)
{
	if (!failed)
		return;
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

/* ---- the server ---- */

struct client {
	struct rdma_cm_id *id;
	struct rdma_event_channel *channel;
	struct ibv_comp_channel *completions;
	struct ibv_cq *cq;
	struct ibv_pd *pd, *foreign_pd;
	struct ibv_mr *all, *local, *foreign, *inbox;
	struct ibv_mw *window;
	int leave_requested;
	uint32_t window_key;
	unsigned char *memory; /* Guard, first region, guard, region without rights,
		region in another domain, guard. */
	unsigned char received[RECEIVES][MESSAGE];
};

static int post_receive(struct client *client, uint64_t n)
{
	struct ibv_sge sge = { (uintptr_t)client->received[n], MESSAGE, client->inbox->lkey };
	struct ibv_recv_wr wr = { .wr_id = n, .sg_list = &sge, .num_sge = 1 }, *bad;

	return ibv_post_recv(client->id->qp, &wr, &bad);
}

static int prepare(struct client *client)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, RECEIVES, 1, 1, 0 } };

	/* The pages return to the system at the end, so that they do not look like a leak. */
	client->memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			      0);
	if (client->memory == MAP_FAILED) {
		client->memory = NULL;
		return -1;
	}
	client->completions = ibv_create_comp_channel(client->id->verbs);
	client->pd = ibv_alloc_pd(client->id->verbs);
	client->foreign_pd = ibv_alloc_pd(client->id->verbs);
	if (!client->completions || !client->pd || !client->foreign_pd)
		return -1;
	client->cq = ibv_create_cq(client->id->verbs, RECEIVES + 8, NULL, client->completions, 0);
	client->all = ibv_reg_mr(client->pd, client->memory + GUARD, REGION,
				 plain ? RIGHTS : RIGHTS | IBV_ACCESS_MW_BIND);
	client->local = ibv_reg_mr(client->pd, client->memory + 2 * GUARD + REGION, GUARD,
				   IBV_ACCESS_LOCAL_WRITE);
	client->foreign = ibv_reg_mr(client->foreign_pd, client->memory + 3 * GUARD + REGION, GUARD,
				     RIGHTS);
	client->inbox = ibv_reg_mr(client->pd, client->received, sizeof client->received,
				   IBV_ACCESS_LOCAL_WRITE);
	if (!client->cq || !client->all || !client->local || !client->foreign || !client->inbox)
		return -1;
	if (!plain && !(client->window = ibv_alloc_mw(client->pd, IBV_MW_TYPE_2)))
		return -1;
	if (client->window)
		client->window_key = ibv_inc_rkey(client->window->rkey);
	attr.send_cq = attr.recv_cq = client->cq;
	if (rdma_create_qp(client->id, client->pd, &attr) || ibv_req_notify_cq(client->cq, 0))
		return -1;
	for (uint64_t n = 0; n < RECEIVES; n++)
		if (post_receive(client, n))
			return -1;
	return 0;
}

static int accept_client(struct client *client)
{
	struct grant grant = {
		.address = htobe64((uintptr_t)client->all->addr),
		.length = htobe32(REGION),
		.all = htobe32(client->all->rkey),
		.local = htobe32(client->local->rkey),
		.foreign = htobe32(client->foreign->rkey),
		.window = htobe32(client->window_key),
	};
	struct rdma_conn_param param = {
		.private_data = &grant,
		.private_data_len = sizeof grant,
		.responder_resources = READS,
		.initiator_depth = READS,
	};

	return rdma_accept(client->id, &param);
}

static int bind_window(struct client *client)
{
	struct ibv_send_wr wr = { .wr_id = BIND_WR_ID, .opcode = IBV_WR_BIND_MW,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.bind_mw.mw = client->window;
	wr.bind_mw.rkey = client->window_key;
	wr.bind_mw.bind_info.mr = client->all;
	wr.bind_mw.bind_info.addr = (uintptr_t)client->all->addr + GUARD;
	wr.bind_mw.bind_info.length = 2 * GUARD;
	wr.bind_mw.bind_info.mw_access_flags = IBV_ACCESS_REMOTE_READ;
	return ibv_post_send(client->id->qp, &wr, &bad);
}

/* Polls completions, and posts consumed receives again. Returns -1 after a failure or the message
 * "Leave". */
static int poll_completions(struct client *client)
{
	struct ibv_wc wc;
	int n;

	while ((n = ibv_poll_cq(client->cq, 1, &wc)) > 0) {
		if (wc.status != IBV_WC_SUCCESS)
			return -1;
		if (wc.wr_id == BIND_WR_ID) {
			client->memory[GUARD + REGION - 9] = 1;
			continue;
		}
		client->leave_requested = wc.byte_len == 5 && !memcmp(client->received[wc.wr_id],
			"Leave",
				5);
		if (client->leave_requested || post_receive(client, wc.wr_id))
			return -1;
	}
	return n;
}

/* Serves the client until the connection ends or the client sends "Leave". */
static void serve_connection(struct client *client)
{
	struct pollfd fds[] = { { client->channel->fd, POLLIN, 0 },
				{ client->completions->fd, POLLIN, 0 } };
	struct rdma_cm_event *event;
	struct ibv_cq *cq;
	void *context;
	int over = 0;

	while (!over) {
		if (poll(fds, 2, -1) < 0)
			break;
		if (fds[1].revents && !ibv_get_cq_event(client->completions, &cq, &context)) {
			ibv_ack_cq_events(cq, 1);
			if (ibv_req_notify_cq(client->cq, 0) || poll_completions(client))
				fds[1].fd = -1;
			over = client->leave_requested;
		}
		if (fds[0].revents && !rdma_get_cm_event(client->channel, &event)) {
			over |= event->event != RDMA_CM_EVENT_ESTABLISHED ||
				(client->window && bind_window(client));
			rdma_ack_cm_event(event);
		}
	}
	if (!client->leave_requested)
		rdma_disconnect(client->id);
}

static void check_memory(const struct client *client)
{
	const unsigned char *end = client->memory + GUARD + REGION;

	for (const unsigned char *at = client->memory; at < end + 3 * GUARD; at++) {
		if (at == client->memory + GUARD)
			at = end - 8;
		if (*at) {
			fprintf(stderr,
				"a peer has changed octet %td, relative to the region, without permission\n",
				at - client->memory - GUARD);
			exit(3);
		}
	}
}

static void *client_thread(void *argument)
{
	struct client *client = argument;

	if (prepare(client) || accept_client(client))
		fprintf(stderr, "cannot serve a client: %s\n", strerror(errno));
	else
		serve_connection(client);
	if (client->id->qp)
		rdma_destroy_qp(client->id);
	if (client->window)
		fail_if(ibv_dealloc_mw(client->window), "freeing a window");
	for (struct ibv_mr **mr = &client->all; mr <= &client->inbox; mr++)
		if (*mr)
			fail_if(ibv_dereg_mr(*mr), "deregistering a region");
	if (client->memory)
		check_memory(client);
	rdma_destroy_id(client->id);
	if (client->cq)
		fail_if(ibv_destroy_cq(client->cq), "destroying a completion queue");
	if (client->completions)
		ibv_destroy_comp_channel(client->completions);
	if (client->pd)
		fail_if(ibv_dealloc_pd(client->pd), "freeing a protection domain");
	if (client->foreign_pd)
		ibv_dealloc_pd(client->foreign_pd);
	rdma_destroy_event_channel(client->channel);
	if (client->memory)
		munmap(client->memory, MEMORY);
	free(client);
	return NULL;
}

static void serve(struct sockaddr_in *address)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listener;
	struct rdma_cm_event *event;
	pthread_attr_t detached;

	pthread_attr_init(&detached);
	pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
	fail_if(!channel || rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "an identifier");
	/* A large backlog: many requests may arrive before this thread runs, and requests beyond the
	 * backlog are rejected, including those of good clients. */
	fail_if(rdma_bind_addr(listener, (struct sockaddr *)address) || rdma_listen(listener, 1024),
		"listening");
	printf("listening on port %d\n", ntohs(rdma_get_src_port(listener)));
	while (!rdma_get_cm_event(channel, &event)) {
		struct rdma_cm_id *id = event->id;
		int request = event->event == RDMA_CM_EVENT_CONNECT_REQUEST;
		struct client *client;
		pthread_t thread;

		rdma_ack_cm_event(event);
		if (!request)
			continue;
		client = calloc(1, sizeof *client);
		fail_if(!client, "memory");
		client->id = id;
		client->channel = rdma_create_event_channel();
		if (!client->channel || rdma_migrate_id(id, client->channel) ||
		    pthread_create(&thread, &detached, client_thread, client)) {
			rdma_destroy_id(id);
			free(client);
		}
	}
}

/* ---- the good client ---- */

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static void *expect(struct rdma_event_channel *channel, enum rdma_cm_event_type type,
		    struct grant *grant)
{
	struct rdma_cm_event *event;

	fail_if(rdma_get_cm_event(channel, &event), "an event");
	if (event->event != type) {
		fprintf(stderr, "%s instead of %s\n", rdma_event_str(event->event),
			rdma_event_str(type));
		exit(1);
	}
	if (grant && event->param.conn.private_data_len >= sizeof *grant)
		memcpy(grant, event->param.conn.private_data, sizeof *grant);
	rdma_ack_cm_event(event);
	return NULL;
}

static void wait_for_completions(struct ibv_cq *cq, int n)
{
	double limit = now() + TIMEOUT_MS * 1e3;

	while (n) {
		struct ibv_wc wc;
		int got = ibv_poll_cq(cq, 1, &wc);

		fail_if(got < 0 || (!got && now() > limit), "no completion within the time limit");
		if (!got)
			continue;
		if (wc.status != IBV_WC_SUCCESS) {
			fprintf(stderr, "request %d: %s\n", (int)wc.wr_id,
				ibv_wc_status_str(wc.status));
			exit(1);
		}
		n--;
	}
}

#define BLOCK 1024

static uint64_t memory[3 * BLOCK / 8];

static void run_round(struct rdma_cm_id *id, struct ibv_cq *cq, const struct grant *grant,
		      uint32_t key, uint64_t n)
{
	uint64_t at = be64toh(grant->address) + 4096 + n % 8 * BLOCK;
	uint32_t rkey = be32toh(grant->all);
	uintptr_t base = (uintptr_t)memory;
	struct ibv_sge source = { base, BLOCK, key }, sink = { base + BLOCK, BLOCK, key },
		word = { base + 2 * BLOCK, 8, key };
	struct ibv_send_wr wrs[] = {
		{ .wr_id = 1, .sg_list = &source, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		  .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { at, rkey } },
		{ .wr_id = 2, .sg_list = &sink, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
		  .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { at, rkey } },
		{ .wr_id = 3, .sg_list = &word, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		  .send_flags = IBV_SEND_SIGNALED, .wr.atomic = { be64toh(grant->address), 1, 0,
				  rkey } },
		{ .wr_id = 4, .sg_list = &source, .num_sge = 1, .opcode = IBV_WR_SEND,
		  .send_flags = IBV_SEND_SIGNALED },
	}, *bad;

	for (int i = 0; i < BLOCK / 8; i++)
		memory[i] = n * 0x9e3779b97f4a7c15u + (uint64_t)i;
	source.length = BLOCK;
	for (int i = 0; i < 3; i++)
		wrs[i].next = &wrs[i + 1];
	if (plain)
		wrs[1].next = &wrs[3];
	struct ibv_sge message = { base, MESSAGE, key };
	wrs[3].sg_list = &message;
	fail_if(ibv_post_send(id->qp, wrs, &bad), "posting");
	wait_for_completions(cq, plain ? 3 : 4);
	if (memcmp(memory, memory + BLOCK / 8, BLOCK) || (!plain && memory[2 * BLOCK / 8] != n)) {
		fprintf(stderr, "round %d returned wrong data\n", (int)n);
		exit(4);
	}
}

static int compare_doubles(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void measure(struct sockaddr_in *address, int rounds)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 8, 1, 1, 1, 0 } };
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = READS };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	double *times = calloc((size_t)rounds, sizeof *times);
	struct grant grant = {};
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;

	fail_if(!times || !channel || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP),
		"an identifier");
	fail_if(rdma_resolve_addr(id, NULL, (struct sockaddr *)address, TIMEOUT_MS),
		"resolving the address");
	expect(channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
	fail_if(rdma_resolve_route(id, TIMEOUT_MS), "resolving the route");
	expect(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
	pd = ibv_alloc_pd(id->verbs);
	cq = ibv_create_cq(id->verbs, 16, NULL, NULL, 0);
	fail_if(!pd || !cq, "a protection domain and a completion queue");
	mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	attr.send_cq = attr.recv_cq = cq;
	fail_if(!mr || rdma_create_qp(id, pd, &attr) || rdma_connect(id, &param), "connecting");
	expect(channel, RDMA_CM_EVENT_ESTABLISHED, &grant);
	for (int n = 0; n < rounds; n++) {
		double start = now();

		run_round(id, cq, &grant, mr->lkey, (uint64_t)n);
		times[n] = now() - start;
	}
	rdma_disconnect(id);
	qsort(times, (size_t)rounds, sizeof *times, compare_doubles);
	printf("p50 %.0f p99 %.0f us\n", times[rounds / 2], times[rounds * 99 / 100]);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	int measures, rounds;

	plain = argc > 4 && !strcmp(argv[argc - 1], "plain");
	argc -= plain;
	measures = argc == 5 && !strcmp(argv[1], "measure");
	rounds = measures ? atoi(argv[4]) : 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if ((!measures && (argc != 4 || strcmp(argv[1], "serve"))) ||
	    inet_pton(AF_INET, argv[2], &address.sin_addr) != 1 ||
	    (measures && rounds < 1)) {
		fprintf(stderr,
			"usage: granting serve ADDR PORT [plain] | granting measure ADDR PORT ROUNDS [plain]\n");
		return 2;
	}
	address.sin_port = htons((unsigned short)atoi(argv[3]));
	if (measures)
		measure(&address, rounds);
	else
		serve(&address);
	return 0;
}
