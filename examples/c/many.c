/* Lesson 9: a server with many clients. They share one receive queue, and credits keep each client
 * from sending more than the server has room for.
 *
 * usage: many CLIENTS [HOST]     (with HOST: as a client, which sends the numbers to 1000) */
#include "lesson.h"
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#define PORT "7471"
#define MOST_CLIENTS 64
#define CREDITS 4 /* how many receives the server posts for each client */
#define NUMBERS 1000

static uint32_t slots[MOST_CLIENTS * CREDITS];
static struct rdma_cm_id *ids[MOST_CLIENTS];
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_mr *mr;

static struct rdma_cm_id *endpoint(const char *host, struct ibv_qp_init_attr *queues)
{
	struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP,
				      .ai_flags = host ? 0 : RAI_PASSIVE}, *address;
	struct rdma_cm_id *id;

	check(rdma_getaddrinfo(host, PORT, &hints, &address), "rdma_getaddrinfo");
	check(rdma_create_ep(&id, address, NULL, queues), "rdma_create_ep");
	rdma_freeaddrinfo(address);
	return id;
}

static void post_receive(int slot)
{
	struct ibv_sge sge = {(uintptr_t)&slots[slot], sizeof(slots[slot]), mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1}, *bad;

	check(ibv_post_srq_recv(srq, &wr, &bad), "ibv_post_srq_recv");
}

static void accept_client(struct rdma_cm_id *id, struct ibv_pd *pd, int number)
{
	struct rdma_conn_param param = {0};
	struct ibv_qp_init_attr queues = {.qp_type = IBV_QPT_RC, .sq_sig_all = 1, .send_cq = cq,
		.recv_cq = cq, .srq = srq, .cap = {2 * CREDITS, 0, 1, 0, 0}};

	check(rdma_create_qp(id, pd, &queues), "rdma_create_qp");
	for (int k = 0; k < CREDITS; k++)
		post_receive(number * CREDITS + k);
	check(rdma_accept(id, &param), "rdma_accept");
}

static void serve(int clients)
{
	unsigned long sums[MOST_CLIENTS] = {0};
	struct rdma_cm_id *listener = endpoint(NULL, NULL);
	int i, all = clients * CREDITS;
	int pending = 2 * clients * NUMBERS; /* completions: of receives, and of credits */

	check(rdma_listen(listener, clients), "rdma_listen");
	for (i = 0; i < clients; i++) {
		check(rdma_get_request(listener, &ids[i]), "rdma_get_request");
		if (i == 0) {
			struct ibv_srq_init_attr attr = {.attr = {all, 1, 0}};

			cq = created(ibv_create_cq(ids[0]->verbs, 3 * all, NULL, NULL, 0), "cq");
			srq = created(ibv_create_srq(ids[0]->pd, &attr), "ibv_create_srq");
			mr = created(rdma_reg_msgs(ids[0], slots, sizeof(slots)), "rdma_reg_msgs");
		}
		accept_client(ids[i], ids[0]->pd, i);
	}
	printf("%d clients share %d receives\n", clients, all);
	while (pending-- > 0) {
		struct ibv_wc wc = completion(cq);

		if (wc.opcode != IBV_WC_RECV)
			continue;
		for (i = 0; ids[i]->qp->qp_num != wc.qp_num;)
			i++;
		sums[i] += slots[wc.wr_id];
		post_receive(wc.wr_id);
		/* A credit: a message without data. The receive must be posted first. */
		check(rdma_post_sendv(ids[i], NULL, NULL, 0, 0), "rdma_post_sendv");
	}
	for (i = 0; i < clients; i++)
		printf("client %d has sent %d numbers, their sum is %lu\n", i + 1, NUMBERS, sums[i]);
}

static void send_numbers(struct rdma_cm_id *id)
{
	struct rdma_conn_param param = {0}; /* repeats no message: there is always a receive */
	uint32_t number;
	struct ibv_mr *own = created(rdma_reg_msgs(id, &number, sizeof(number)), "own");

	for (int k = 0; k < CREDITS; k++)
		check(rdma_post_recvv(id, NULL, NULL, 0), "rdma_post_recvv");
	check(rdma_connect(id, &param), "rdma_connect");
	for (number = 1; number <= NUMBERS + CREDITS; number++) {
		if (number > CREDITS) { /* All credits are used: wait for one. */
			completion(id->recv_cq);
			check(rdma_post_recvv(id, NULL, NULL, 0), "rdma_post_recvv");
		}
		if (number <= NUMBERS) {
			check(rdma_post_send(id, NULL, &number, 4, own, 0), "rdma_post_send");
			completion(id->send_cq);
		}
	}
	rdma_disconnect(id);
}

int main(int argc, char **argv)
{
	struct ibv_qp_init_attr queues = {.sq_sig_all = 1, .cap = {1, CREDITS, 1, 1, 0}};
	int clients = argc > 1 ? atoi(argv[1]) : 0;
	check(clients < 1 || clients > MOST_CLIENTS ? EINVAL : 0, "usage: many CLIENTS [HOST]");
	if (argc > 2)
		send_numbers(endpoint(argv[2], &queues));
	else
		serve(clients);
	return 0;
}
