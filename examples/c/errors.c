/* Lesson 8: makes requests that fail, and prints how. The server offers 64 bytes to read.
 *
 * usage: errors             serves clients on port 7471 until it is stopped
 *        errors HOST good   reads the 64 bytes
 *        errors HOST local  reads them into memory for which it uses a wrong key
 *        errors HOST key    uses a wrong remote key
 *        errors HOST bounds reads one byte too many
 *        errors HOST long   sends more than the server's receive has room for */
#include "lesson.h"
#include <arpa/inet.h>
#include <endian.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#define PORT "7471"
#define SIZE 64

struct offer {
	uint64_t address; /* big-endian, as the next one */
	uint32_t rkey;
} __attribute__((packed));

static char board[SIZE], local[2 * SIZE];

static struct rdma_cm_id *endpoint(const char *host)
{
	struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP,
				      .ai_flags = host ? 0 : RAI_PASSIVE}, *address;
	struct ibv_qp_init_attr queues = {
		.sq_sig_all = 1,
		.cap = {.max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
	};
	struct rdma_cm_id *id;

	check(rdma_getaddrinfo(host, PORT, &hints, &address), "rdma_getaddrinfo");
	check(rdma_create_ep(&id, address, NULL, &queues), "rdma_create_ep");
	rdma_freeaddrinfo(address);
	return id;
}

static void serve_one(struct rdma_cm_id *listener)
{
	struct rdma_cm_id *id;
	struct ibv_wc wc;

	check(rdma_get_request(listener, &id), "rdma_get_request");
	struct ibv_mr *mr = created(rdma_reg_read(id, board, SIZE), "rdma_reg_read");
	struct offer offer = {htobe64((uintptr_t)board), htonl(mr->rkey)};
	struct rdma_conn_param param = {.private_data = &offer, .private_data_len = sizeof(offer),
					.responder_resources = 1};
	/* The receive has no room for data. */
	check(rdma_post_recvv(id, NULL, NULL, 0), "rdma_post_recvv");
	check(rdma_accept(id, &param), "rdma_accept");
	check(rdma_get_recv_comp(id, &wc) == 1 ? 0 : -1, "rdma_get_recv_comp");
	printf("the server's receive: %s\n", ibv_wc_status_str(wc.status));
	fflush(stdout);
	rdma_disconnect(id);
	rdma_dereg_mr(mr);
	rdma_destroy_ep(id);
}

static void outcome(struct rdma_cm_id *id, const char *what)
{
	struct ibv_wc wc;

	check(rdma_get_send_comp(id, &wc) == 1 ? 0 : -1, "rdma_get_send_comp");
	printf("%s: %s\n", what, ibv_wc_status_str(wc.status));
}

static void try(struct rdma_cm_id *id, const char *fault)
{
	struct rdma_conn_param param = {.initiator_depth = 1};
	struct ibv_mr *mr = created(rdma_reg_write(id, local, sizeof(local)), "reg");
	struct ibv_mr used = *mr;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct offer offer;

	check(rdma_connect(id, &param), "rdma_connect");
	memcpy(&offer, id->event->param.conn.private_data, sizeof(offer));
	uint64_t address = be64toh(offer.address);
	uint32_t rkey = ntohl(offer.rkey);
	size_t length = SIZE;

	if (strcmp(fault, "local") == 0)
		used.lkey ^= 1;
	if (strcmp(fault, "key") == 0)
		rkey ^= 1;
	if (strcmp(fault, "bounds") == 0)
		length++;
	if (strcmp(fault, "long") == 0)
		check(rdma_post_send(id, NULL, local, length, mr, 0), "rdma_post_send");
	else
		check(rdma_post_read(id, NULL, local, length, &used, 0, address, rkey), "rdma_post_read");
	outcome(id, "the request");
	check(rdma_post_read(id, NULL, local, SIZE, mr, 0, address, ntohl(offer.rkey)),
	      "rdma_post_read");
	outcome(id, "a correct Read after it");
	check(ibv_query_qp(id->qp, &attr, IBV_QP_STATE, &init), "ibv_query_qp");
	printf("the queue pair: %s\n", attr.qp_state == IBV_QPS_RTS ? "connected" : "in error");
	rdma_disconnect(id);
	rdma_dereg_mr(mr);
}

int main(int argc, char **argv)
{
	struct rdma_cm_id *id = endpoint(argc > 1 ? argv[1] : NULL);

	if (argc > 1)
		try(id, argc > 2 ? argv[2] : "good");
	else
		check(rdma_listen(id, 4), "rdma_listen");
	while (argc == 1)
		serve_one(id);
	rdma_destroy_ep(id);
	return 0;
}
