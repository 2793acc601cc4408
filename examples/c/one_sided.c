/* Lesson 5: the client writes into the server's memory and reads it. The server's program takes no
 * part in this: it sleeps until the client says goodbye.
 *
 * usage: one_sided          offers a board on port 7471
 *        one_sided HOST     writes to the board of HOST and reads it */
#include "lesson.h"
#include <arpa/inet.h>
#include <endian.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#define PORT "7471"
#define SIZE 256

/* What a peer must know to use our memory. The server sends it in a message. */
struct offer {
	uint64_t address; /* big-endian, as the others */
	uint64_t length;
	uint32_t rkey;
} __attribute__((packed));

static struct offer offer;
static char board[SIZE] = "nothing yet", local[SIZE];

static struct rdma_cm_id *endpoint(const char *host)
{
	struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP,
				      .ai_flags = host ? 0 : RAI_PASSIVE}, *address;
	struct ibv_qp_init_attr queues = {
		.sq_sig_all = 1,
		.cap = {.max_send_wr = 1, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1},
	};
	struct rdma_cm_id *id;

	check(rdma_getaddrinfo(host, PORT, &hints, &address), "rdma_getaddrinfo");
	check(rdma_create_ep(&id, address, NULL, &queues), "rdma_create_ep");
	rdma_freeaddrinfo(address);
	return id;
}

/* Waits until a request has completed, of which `result` says whether it was posted. */
static void complete(struct rdma_cm_id *id, int result, const char *call)
{
	struct ibv_wc wc;

	check(result, call);
	succeeded(rdma_get_send_comp(id, &wc), &wc);
}

static void receive(struct rdma_cm_id *id)
{
	struct ibv_wc wc;

	succeeded(rdma_get_recv_comp(id, &wc), &wc);
}

static void serve(struct rdma_cm_id *listener)
{
	struct rdma_conn_param param = {.responder_resources = 1};
	struct rdma_cm_id *id;
	struct ibv_mr *mr, *offer_mr, *local_mr;

	check(rdma_listen(listener, 1), "rdma_listen");
	printf("the board says '%s'\n", board);
	check(rdma_get_request(listener, &id), "rdma_get_request");
	mr = created(ibv_reg_mr(id->pd, board, SIZE, IBV_ACCESS_LOCAL_WRITE |
				IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE), "ibv_reg_mr");
	local_mr = created(rdma_reg_msgs(id, local, SIZE), "rdma_reg_msgs");
	for (int i = 0; i < 2; i++) /* for the client's hello and goodbye */
		check(rdma_post_recv(id, NULL, local, SIZE, local_mr), "rdma_post_recv");
	check(rdma_accept(id, &param), "rdma_accept");
	receive(id); /* Only now may this end send, on iWARP. */
	offer = (struct offer){htobe64((uintptr_t)board), htobe64(SIZE), htonl(mr->rkey)};
	offer_mr = created(rdma_reg_msgs(id, &offer, sizeof(offer)), "rdma_reg_msgs");
	complete(id, rdma_post_send(id, NULL, &offer, sizeof(offer), offer_mr, 0), "rdma_post_send");
	receive(id); /* the goodbye, which also says that all Writes have arrived */
	printf("the board says '%s'\n", board);
	rdma_dereg_mr(local_mr), rdma_dereg_mr(offer_mr), rdma_dereg_mr(mr);
	rdma_destroy_ep(id);
}

static void use(struct rdma_cm_id *id, const char *text)
{
	struct rdma_conn_param param = {.initiator_depth = 1};
	/* iWARP cards need the right of remote write for the target of a Read. */
	struct ibv_mr *mr = created(rdma_reg_write(id, local, SIZE), "rdma_reg_write");
	struct ibv_mr *offer_mr = created(rdma_reg_msgs(id, &offer, sizeof(offer)), "rdma_reg_msgs");

	check(rdma_post_recv(id, NULL, &offer, sizeof(offer), offer_mr), "rdma_post_recv");
	check(rdma_connect(id, &param), "rdma_connect");
	complete(id, rdma_post_sendv(id, NULL, NULL, 0, 0), "rdma_post_sendv");
	receive(id);
	uint64_t address = be64toh(offer.address);
	uint32_t rkey = ntohl(offer.rkey);
	printf("the server offers its memory with the rkey 0x%08x\n", rkey);

	complete(id, rdma_post_read(id, NULL, local, SIZE, mr, 0, address, rkey), "rdma_post_read");
	printf("read   '%s'\n", local);
	strcpy(local, text);
	complete(id, rdma_post_write(id, NULL, local, SIZE, mr, 0, address, rkey), "rdma_post_write");
	printf("wrote  '%s'\n", local);
	memset(local, 0, SIZE);
	complete(id, rdma_post_read(id, NULL, local, SIZE, mr, 0, address, rkey), "rdma_post_read");
	printf("read   '%s'\n", local);
	complete(id, rdma_post_sendv(id, NULL, NULL, 0, 0), "rdma_post_sendv");
	rdma_disconnect(id);
	rdma_dereg_mr(offer_mr), rdma_dereg_mr(mr);
}

int main(int argc, char **argv)
{
	struct rdma_cm_id *id = endpoint(argc > 1 ? argv[1] : NULL);

	if (argc > 1)
		use(id, "the client was here");
	else
		serve(id);
	rdma_destroy_ep(id);
	return 0;
}
